"""Property-based tests on several ranks: Hypothesis runs the same examples on all ranks."""
