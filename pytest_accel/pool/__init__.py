"""The pool: the worlds and leases of a session, and the clients through which drivers reach it."""
