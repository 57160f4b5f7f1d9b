"""pytest-benchmark: the statistics of rank 0, in the session's table and files.

pytest-benchmark runs a function for as many rounds as fit into a given time. The ranks of a test measure different
times, but a function with a collective must run equally often on all of them. So ranks run the least number of rounds
(``--benchmark-min-rounds``), once each. Only a test with one rank chooses its rounds by time.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pytest_accel.features.plugins.rows import named
from pytest_accel.rank.context import RANK

_NAME = "pytest-benchmark"
"""The name of the plugin, and of its session, which it registers with pytest."""
_FIXTURE = "pytest_benchmark.fixture", "BenchmarkFixture"
_ABOUT = ("name", "fullname", "group", "extra_info", "iterations")


def in_rank(config: pytest.Config) -> object:
    """Return the plugin that sends the measurements of a rank."""
    context = config.stash[RANK]
    session: Any = config.pluginmanager.get_plugin(_NAME)
    was_disabled, session.disabled = session.disabled, True  # With an unknown release, functions run once.
    if context.spec.ranks > 1:
        pytest.MonkeyPatch().setattr(named(*_FIXTURE), "_calibrate_timer", _run_least_rounds)
    # The driver writes the profiles, and measures nothing where xdist distributes its tests.
    session.options["cprofile_dump"] = False
    session.disabled = was_disabled or context.session.distributed
    return _InRank(session, context.rank)


def _run_least_rounds(fixture: Any, runner: object) -> tuple[float, int, range]:
    """Return duration, iterations and range of a round, without measuring them."""
    fixture._warmup = fixture._precision = None  # Both end by a rank's own times.
    return math.inf, 1, range(1)


def in_driver(config: pytest.Config) -> object:
    """Return the plugin that adds the statistics of rank 0 to the session's."""
    return _InDriver(config.pluginmanager.get_plugin(_NAME), named(*_FIXTURE))


class _InRank:
    def __init__(self, session: Any, rank: int) -> None:
        self._session, self._rank = session, rank

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        if report.when != "teardown":
            return None
        failed = any(one.has_error for one in self._session.benchmarks)
        measured = [one for one in self._session.benchmarks if one.stats]
        self._session.benchmarks.clear()  # Keep the list itself: fixtures hold its method `append`.
        if failed:
            return {"failed": True}
        if self._rank or not measured:
            return None
        about = {name: getattr(measured[-1], name) for name in _ABOUT}
        text = named("pytest_benchmark.utils", "safe_dumps")(about)
        return {"about": text, "seconds": list(measured[-1].stats.data)}


class _InDriver:
    """Adds the statistics of a marked test to pytest-benchmark's session, as an entry for each test."""

    def __init__(self, session: Any, fixture: Any) -> None:
        self._session, self._fixture = session, fixture

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        if any("failed" in one for one in sent.values()):
            return
        session, mark, about = self._session, item.get_closest_marker("benchmark"), json.loads(sent[0]["about"])
        options = {**session.options, **(mark.kwargs if mark else {})}
        if mark and "timer" in mark.kwargs:
            options["timer"] = named("pytest_benchmark.utils", "NameWrapper")(mark.kwargs["timer"])
        add = session.benchmarks.append
        made = self._fixture(
            item, add_stats=add, logger=session.logger, warner=item.warn, disabled=session.disabled, **options
        )
        made.name, made.fullname, made.group = about["name"], about["fullname"], about["group"]
        made.extra_info = about["extra_info"]
        made._make_stats(about["iterations"]).stats.data.extend(sent[0]["seconds"])
