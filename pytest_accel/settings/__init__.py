"""The options of a session, and the machine as they describe it."""
