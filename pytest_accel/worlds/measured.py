"""Whether ranks measure coverage."""

from __future__ import annotations

import os


def is_measured() -> bool:
    """Whether the ranks of this process measure coverage: they save it when they end, and lose it when they are killed.

    coverage's variables are those of its ``patch = subprocess`` (coverage.py, "Coverage subprocesses").
    """
    return any(name.startswith("COVERAGE_PROCESS_") for name in os.environ)
