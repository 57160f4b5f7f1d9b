"""Costs of the plugin, compared with other tools: ``python -m benchmarks``."""
