"""Code that all packages share: requirements, world specs, messages, paths, the clock, operating system helpers."""
