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
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core.interpreter import COVERAGE_SETTINGS

if TYPE_CHECKING:
    from coverage import Coverage


class _PytestCov:
    """Stand-in for pytest-cov's plugin, with the attributes that its fixture `cov` and other plugins use."""

    _started = True

    def __init__(self, coverage: Coverage) -> None:
        self.cov_controller = SimpleNamespace(cov=coverage)


class RankCoverage:
    """Pytest plugin that measures this rank and saves the data after each test. It starts before conftests are read."""

    def __init__(self, settings: str) -> None:
        import coverage

        self._contexts = False
        """True if lines are recorded under the test that ran them (``--cov-context=test``)."""
        self._by_pytest_cov = False
        """True if pytest-cov measures the main process; False if coverage was started outside of pytest."""
        os.environ[COVERAGE_SETTINGS] = settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            running = coverage.process_startup()
        if running is None:
            raise RuntimeError("coverage already measures this process, which is a rank: unset COVERAGE_PROCESS_START")
        self.coverage = running
        patches = running.get_option("run:patch")
        if not (isinstance(patches, list) and "subprocess" in patches):
            del os.environ[COVERAGE_SETTINGS]
        # coverage itself saves nothing at exit if a test has created its own Coverage object.
        atexit.register(self._save)

    def pytest_configure(self, config: pytest.Config) -> None:
        option = config.option
        self._by_pytest_cov = bool(getattr(option, "cov_source", None))
        self._contexts = self._by_pytest_cov and option.cov_context == "test"
        if self._by_pytest_cov:
            config.pluginmanager.unblock("_cov")
            config.pluginmanager.register(_PytestCov(self.coverage), "_cov")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self._switch("")
            self._save()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._switch(f"{item.nodeid}|setup")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        self._switch(f"{item.nodeid}|run")
        left_out = item.get_closest_marker("no_cover") is not None or "no_cover" in getattr(item, "fixturenames", ())
        if not (left_out and self._by_pytest_cov and type(self.coverage).current() is self.coverage):
            return (yield)  # If another coverage is active, such as pytest-testmon's, start() would stop that one.
        self.coverage.stop()
        try:
            return (yield)
        finally:
            with _silence():
                self.coverage.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._switch(f"{item.nodeid}|teardown")

    def _switch(self, context: str) -> None:
        """Record the lines that run from now on under `context`, a text in pytest-cov's format."""
        if self._contexts:
            with _silence():
                self.coverage.switch_context(context)

    def _save(self) -> None:
        with _silence():
            self.coverage.save()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress coverage's warnings, and its errors after a test has stopped it, so that they do not fail a test.

    The main process still shows its own warnings when it saves its data.
    """
    from coverage.exceptions import CoverageException

    with warnings.catch_warnings(), contextlib.suppress(CoverageException):
        warnings.simplefilter("ignore")
        yield


def start(settings: str | None, pluginmanager: pytest.PytestPluginManager) -> None:
    """Start measuring this rank with `settings`, unless None. Block pytest-cov, which would write a report."""
    pluginmanager.set_blocked("_cov")
    if settings is not None:
        plugin: Any = RankCoverage(settings)
        pluginmanager.register(plugin, "accel-coverage")
