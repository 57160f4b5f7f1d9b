"""What the plugin costs, beside its peers: ``python -m benchmarks``."""
