"""Diagnostics of ranks from outside their processes: stacks, exit statuses, collectives, memory."""
