"""Property-based tests on several ranks: Hypothesis runs the same examples on all ranks.

Without it, a collective in such a test would hang or mix different data. Page: ``docs/how-to/test-properties.md``.
"""
