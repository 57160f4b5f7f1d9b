"""Features: optional parts that plug into the kernel."""
