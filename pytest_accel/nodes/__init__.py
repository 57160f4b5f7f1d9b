"""Ranks in processes that a launcher has started, on this machine and on others."""
