"""Code that runs inside a rank: its pytest session, process group, environment, leak check and debugger."""
