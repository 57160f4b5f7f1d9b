"""Private names of pytest, pytest-xdist and torch, which no other package uses."""
