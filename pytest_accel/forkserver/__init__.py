"""The process from which ranks are forked, and its client."""
