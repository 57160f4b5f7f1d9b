"""Coverage of the code that runs in ranks.

Each rank measures with the settings of the main process's coverage, which pytest-cov, ``coverage run`` or an
environment variable may have started. A rank writes its own data files, and the main process adds them to its data
when the ranks have exited. The fork server is not measured.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from coverage import Coverage

_SETTINGS = "COVERAGE_PROCESS_CONFIG"
"""Environment variable from which `coverage.process_startup` reads serialized settings."""
_SETTINGS_FILE = "COVERAGE_PROCESS_START"
"""Environment variable with the path of a settings file, set by a user."""
_OLDEST = "7.10.3"
"""The first release of coverage that can serialize its settings for another process."""


class DriverCoverage:
    """The coverage of the main process, and a folder in which the ranks write their data files."""

    def __init__(self, coverage: Coverage, parent: Path | None) -> None:
        """Make the folder in `parent` (None: the system's temporary directory)."""
        self._coverage = coverage
        self._folder = tempfile.mkdtemp(prefix="accel-coverage-", dir=parent)

    @property
    def settings(self) -> str:
        """The ranks' settings, serialized for `coverage.process_startup`."""
        config = self._coverage.config.copy()
        config.data_file = os.path.join(self._folder, os.path.basename(config.data_file))
        config.parallel = True
        return config.serialize()

    def combine(self) -> list[str]:
        """Add the ranks' data to this process's data; return the errors of files that could not be read."""
        from coverage import CoverageData
        from coverage.exceptions import CoverageException

        problems = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                own = self._coverage.get_data()
            for file in Path(self._folder).glob("*"):
                try:
                    own.update(CoverageData(str(file)))
                except CoverageException as error:  # For example, the rank was killed while it wrote the file.
                    problems.append(str(error))
        except CoverageException as error:
            problems.append(str(error))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        return problems


def of_this_process(config: pytest.Config) -> Coverage | None:
    """Return the `Coverage` object that measures this process, pytest-cov's or another; None if there is none."""
    controller = getattr(config.pluginmanager.get_plugin("_cov"), "cov_controller", None)
    coverage = getattr(controller, "cov", None)
    if coverage is None:
        current = getattr(getattr(sys.modules.get("coverage"), "Coverage", None), "current", None)
        coverage = current() if current is not None else None
    return coverage


def shortcoming(coverage: Coverage) -> str | None:
    """Return the reason why this release of coverage cannot measure ranks; None if it can."""
    if hasattr(coverage.config, "serialize"):
        return None
    release = sys.modules["coverage"].__version__
    return f"coverage {release} does not measure what ranks run: install coverage {_OLDEST} or newer"


def for_children(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the user's variable that makes coverage measure the processes that a test starts, if it is set."""
    return ((_SETTINGS_FILE, environment[_SETTINGS_FILE]),) if _SETTINGS_FILE in environment else ()


def unmeasured(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that make coverage measure a new Python process from its start."""
    return {name: value for name, value in environment.items() if name not in (_SETTINGS, _SETTINGS_FILE)}


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
        os.environ[_SETTINGS] = settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            running = coverage.process_startup()
        if running is None:
            raise RuntimeError("coverage already measures this process, which is a rank: unset COVERAGE_PROCESS_START")
        self.coverage = running
        patches = running.get_option("run:patch")
        if not (isinstance(patches, list) and "subprocess" in patches):
            del os.environ[_SETTINGS]
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
