"""The messages between the processes of a session, their form, and the connections for them.

There is one module for each conversation, although each has only two ends. The ends are in different packages, as
driver and rank are, and the lower one must not import the upper one. If each message were in the package that sends it,
the receiver would import that package to read it: a rank would import the driver, in each interpreter. A message is a
frozen struct and has no behaviour, so that neither end can depend on the other.
"""
