"""A pytest plugin for distributed and accelerator test suites.

PYTEST_DONT_REWRITE (ranks are forked from a process that has this package imported already).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

import pytest

__all__ = ["LeftoverWarning", "__version__"]

__version__ = "0.1.0.dev0"


class _PlainFinder:
    """Has this package's modules loaded from their bytecode.

    pytest would rewrite the asserts of each, as it does for all plugins, and do so again in every session where no
    bytecode may be written. PYTEST_DONT_REWRITE in a module does without the rewriting, but not without the bytecode.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of this package; None for all others."""
        return PathFinder.find_spec(name, path) if name.startswith(f"{__name__}.") else None


sys.meta_path.insert(0, _PlainFinder)


class LeftoverWarning(pytest.PytestWarning):
    """A test has left something behind in its ranks (``--accel-leaks warn``)."""
