"""All access to internals that may change with any release of pytest, pytest-xdist or torch.

Elsewhere, a broken release would be found by the users of one feature.
"""
