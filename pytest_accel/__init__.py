"""A pytest plugin for distributed and accelerator test suites.

PYTEST_DONT_REWRITE (ranks are forked from a process that has this package imported already).
"""

from __future__ import annotations

import pytest

__all__ = ["LeftoverWarning", "__version__"]

__version__ = "0.1.0.dev0"


class LeftoverWarning(pytest.PytestWarning):
    """A test has left something behind in its ranks (``--accel-leaks warn``)."""
