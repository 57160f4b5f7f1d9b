"""The tables of ``pytest --accel-info`` and the checks of ``python -m pytest_accel doctor``."""
