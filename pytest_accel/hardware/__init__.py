"""What is in the machine, in which order, and how a process is made to see part of it."""
