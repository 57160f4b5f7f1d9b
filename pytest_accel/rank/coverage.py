"""Coverage of the code that runs in ranks.

Each rank measures with the settings of the main process's coverage, which pytest-cov, ``coverage run`` or an
environment variable may have started. A rank writes its own data files, and the main process adds them to its data
when the ranks have exited. The fork server is not measured.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import warnings
from collections.abc import Generator

import pytest

from pytest_accel.core.interpreter import COVERAGE_SETTINGS


class RankCoverage:
    """Pytest plugin that measures this rank and saves the data after each test. It starts before conftests are read."""

    def __init__(self, settings: str) -> None:
        import coverage

        os.environ[COVERAGE_SETTINGS] = settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            running = coverage.process_startup()
        if running is None:
            raise RuntimeError("coverage already measures this process, which is a rank: unset COVERAGE_PROCESS_START")
        self._coverage = running
        patches = running.get_option("run:patch")
        # Processes that the suite starts are measured only if coverage's own patch for them is on.
        if not (isinstance(patches, list) and "subprocess" in patches):
            del os.environ[COVERAGE_SETTINGS]
        # coverage itself saves nothing at exit if a test has created its own Coverage object.
        atexit.register(self._save)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self._save()

    def _save(self) -> None:
        """Save the data. A test may have stopped coverage, which must not fail it."""
        from coverage.exceptions import CoverageException

        with warnings.catch_warnings(), contextlib.suppress(CoverageException):
            warnings.simplefilter("ignore")
            self._coverage.save()


def start(settings: str | None, pluginmanager: pytest.PytestPluginManager) -> None:
    """Start measuring this rank with `settings`, unless None. Block pytest-cov, which would write a report."""
    pluginmanager.set_blocked("_cov")
    if settings is not None:
        pluginmanager.register(RankCoverage(settings), "accel-coverage")
