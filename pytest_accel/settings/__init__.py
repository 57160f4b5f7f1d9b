"""The settings of a session, and the `Machine` that they describe."""
