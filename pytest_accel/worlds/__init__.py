"""The processes that run a test."""
