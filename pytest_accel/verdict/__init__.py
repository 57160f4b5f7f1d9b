"""Merges the outcomes of all ranks into one verdict for each phase of a test, and formats its text."""
