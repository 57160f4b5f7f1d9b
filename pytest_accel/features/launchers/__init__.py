"""Ranks in processes that a launcher has started, on this machine and on others, and on the nodes of a cluster."""
