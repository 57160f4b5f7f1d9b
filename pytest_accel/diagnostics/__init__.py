"""What can be learned about ranks from outside: stacks, exit statuses, collectives, memory."""
