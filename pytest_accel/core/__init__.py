"""Code that several packages share, and that needs no other package.

A module that only one package imports does not belong here, but into that package. Nothing here decides about tests,
devices or worlds, keeps state of a session, or imports torch when it is imported.
"""
