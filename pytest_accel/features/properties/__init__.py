"""Property-based tests: all ranks run the same examples of Hypothesis in lock-step."""
