"""pytest-testmon: a marked test depends on the lines that its ranks execute.

A rank does not load pytest-testmon, which would open its database and select tests. Only its collector measures there.
The driver adds each rank's lines to those that its own collector has measured for the test. pytest-testmon then
handles the test like any other.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.plugins.unknown_releases import WithoutBridge, require, take

WITHOUT = WithoutBridge(
    "pytest-testmon",
    damage="marked tests would be deselected although code that their ranks execute has changed",
)


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that measures which lines a test executes in this rank."""
    select, collector = _rank_internals()
    # With `cov_plugin` it does not check whether this process is traced: the driver has checked that.
    if not select(config, None, cov_plugin=True).collect:
        return None
    return _InRank(collector(str(config.rootpath), cov_plugin=config.pluginmanager.get_plugin("_cov")))


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds the ranks' lines to those that pytest-testmon has measured in this process."""
    collect = config.pluginmanager.get_plugin("TestmonCollect")
    if collect is None:
        return None
    _rank_internals()
    collector = getattr(collect, "testmon", None)
    require(collector, "start_testmon", "discard_current", "get_batch_coverage_data", "close", "cov")
    return _InDriver(collector, is_worker=hasattr(config, "workerinput"))


def _rank_internals() -> tuple[Any, Any]:
    """Return the function that decides whether to measure, and the class of the collector.

    Raise an error if pytest-testmon lacks one of them. The driver checks this before any rank needs them.
    """
    return (
        take("testmon.configure", "header_collect_select"),
        take("testmon.testmon_core", "TestmonCollector"),
    )


class _InRank:
    """Measures the lines that each test executes, and sends them with the last report of the test."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._collector.start_testmon(item.nodeid)
        self._take()  # Discard lines that were executed between tests.
        return (yield)

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, list[int]] | None:
        return self._take() if report.when == "teardown" else None

    def _take(self) -> dict[str, list[int]]:
        """Return the lines executed since the last call, by file.

        The collector's own method is not used, because it creates a new Coverage object.
        """
        data = self._collector.cov.get_data()
        lines = {file: list(data.lines(file) or ()) for file in data.measured_files()}
        data.erase()
        return {file: executed for file, executed in lines.items() if executed}

    def pytest_sessionfinish(self) -> None:
        self._collector.close()


class _InDriver:
    """Adds the lines of a marked test's ranks to those that the driver has measured for the test."""

    def __init__(self, collector: Any, *, is_worker: bool) -> None:
        self._collector = collector
        self._is_worker = is_worker
        self._begun: set[str] = set()
        """Ids of tests that run, or have run, in this process."""
        self._item: pytest.Item | None = None
        self._failed = False
        """True if a phase of `_item` has failed: pytest-testmon then selects the test again in any case."""
        self._ranks: set[int] = set()
        """The ranks that have sent the lines of the running test."""
        self._batch = collector.get_batch_coverage_data
        collector.get_batch_coverage_data = self._get_batch_coverage_data

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._item, self._failed = item, False
        self._ranks.clear()
        self._begun.add(item.nodeid)
        if self._is_worker:
            # Name no next test: it may be put on hold, and the lines of this test must not wait for it.
            self._collector.start_testmon(item.nodeid, None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._failed = self._failed or report.failed
        return report

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, list[int]]]) -> None:
        self._ranks.update(sent)
        lines: dict[str, set[int]] = {}
        for of_rank in sent.values():
            for file, executed in of_rank.items():
                lines.setdefault(file, set()).update(executed)
        self._collector.cov.get_data().add_lines(lines)

    def _get_batch_coverage_data(self) -> dict[str, Any]:
        """Replace the collector's method that returns the lines of each test that has ended."""
        if self._lacks_lines():
            self._collector.discard_current()
        tests: dict[str, Any] = self._batch()
        # Leave out tests on hold: the collector has started them, but they run later or in another process.
        return {test: files for test, files in tests.items() if test in self._begun}

    def _lacks_lines(self) -> bool:
        """Return whether the test would count as passed although its dependencies are not known.

        This happens if a rank has died in a test that is expected to fail, or if the hardware is missing.
        """
        marked = None if self._item is None else self._item.stash.get(MARKED, None)
        if marked is None or self._failed:
            return False
        lacks: bool = (marked.missing is not None or marked.has_begun) and len(self._ranks) < marked.key.ranks
        return lacks
