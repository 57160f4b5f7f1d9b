"""The fork server, which is the process from which ranks are forked, and its client."""
