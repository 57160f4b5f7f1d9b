"""Benchmarks of the plugin, partly in comparison with other tools. Run with ``python -m benchmarks``."""
