"""All access to internals that may change with any release of pytest, pytest-xdist or torch.

In any other place, an incompatible release would be found by the users of one feature.
"""
