"""What the processes of a session send to each other, in which form, and over which connections."""
