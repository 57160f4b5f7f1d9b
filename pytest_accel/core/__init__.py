"""Code that several packages share, and that needs no other package.

The messages between processes are here, one module for each conversation, although each has only two ends. The ends
are in different packages, as driver and rank are, and the lower one must not import the upper one. If each message were
in the package that sends it, the receiver would import that package to unpickle it: a rank would import the driver,
in each interpreter. A message is a frozen struct and has no behaviour, so that neither end can depend on the other.

All access to internals that may change with any release is here, too: of pytest and xdist in `shims`, of torch in
`torch_api`. Elsewhere, a broken release would be found by the users of one feature.

A module that only one package imports does not belong here, but into that package. Nothing here decides about tests,
devices or worlds, keeps state of a session, or imports torch when it is imported.
"""
