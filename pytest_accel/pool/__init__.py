"""Worlds and leases of a session, and the client by which xdist workers reach them."""
