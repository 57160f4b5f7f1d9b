"""pytest-benchmark: the statistics of rank 0, in the session's table and files.

pytest-benchmark measures a function for as many rounds as fit into a given time. The ranks of a test measure different
times, but a function with a collective must run equally often on all of them. So all ranks calibrate with the times of
rank 0, which does not wait for the others: a test may measure on rank 0 alone.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Generator
from typing import Any

import pytest

from pytest_accel.features.plugins.rows import named
from pytest_accel.rank.context import RANK
from pytest_accel.rank.gathering import Gathering

_NAME = "pytest-benchmark"
"""The name of the plugin, and of its session, which it registers with pytest."""
_ABOUT = ("name", "fullname", "group", "extra_info", "iterations")


class BenchmarkError(Exception):
    """A rank cannot take the number of rounds from rank 0."""

    __module__ = "pytest_accel"  # Reports show it.


class RankZeroFailed(BenchmarkError):
    """Rank 0 has failed in the benchmark. The failure of another rank that says so is a consequence of that."""

    __module__ = "pytest_accel"


def in_rank(config: pytest.Config) -> object:
    """Return the plugin that measures in a rank."""
    session: Any = config.pluginmanager.get_plugin(_NAME)
    was_disabled, session.disabled = session.disabled, True
    fixture = _fixture_class()  # With an unknown release, functions run once.
    # The driver writes the profiles, and measures nothing where xdist distributes its tests.
    session.options["cprofile_dump"] = False
    session.disabled = was_disabled or config.stash[RANK].session.distributed
    return _InRank(config, session, fixture)


def in_driver(config: pytest.Config) -> object:
    """Return the plugin that adds the statistics of rank 0 to the session's."""
    return _InDriver(config.pluginmanager.get_plugin(_NAME), _fixture_class())


def _fixture_class() -> Any:
    fixture = named("pytest_benchmark.fixture", "BenchmarkFixture")
    for needed in ("_calibrate_timer", "_get_precision", "_make_stats"):
        getattr(fixture, needed)
    return fixture


class _InRank:
    def __init__(self, config: pytest.Config, session: Any, fixture: Any) -> None:
        context = config.stash[RANK]
        self._rank = context.rank
        self._session = session
        self._failed = False
        """True if this rank has failed while it calibrated."""
        self._exchange = Gathering(context, "benchmark") if context.spec.ranks > 1 else None
        if self._exchange is not None:
            self._calibrate_by_rank_0(fixture, self._exchange)

    def _calibrate_by_rank_0(self, fixture: Any, exchange: Gathering) -> None:
        calibrate, precision = fixture._calibrate_timer, fixture._get_precision

        def of_rank_0(seconds: float) -> float:
            __tracebackhide__ = True
            told = exchange.first(b"%r" % seconds)
            if told == b"failed":
                raise RankZeroFailed("rank 0 has failed and runs no more of the benchmark")
            if told == b"ended":
                raise BenchmarkError(
                    f"rank {self._rank} runs a benchmark that rank 0 does not run, but rank 0 sets the number "
                    "of rounds; use benchmark.pedantic(..., rounds=N), or run the benchmark on rank 0 as well"
                )
            return float(told)

        def calibrate_together(one: Any, runner: Any) -> Any:
            __tracebackhide__ = True
            one._warmup = one._precision = None  # Both end by a rank's own times.
            try:
                return calibrate(one, lambda loops: of_rank_0(runner(loops)))
            except BaseException:
                self._failed = True
                raise

        fixture._calibrate_timer = calibrate_together
        fixture._get_precision = lambda one, timer: of_rank_0(precision(one, timer))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        __tracebackhide__ = True
        end = b"failed"
        try:
            result = yield
            end = b"ended"
            return result
        finally:
            if self._exchange is not None and self._rank == 0 and not self._session.disabled:
                self._exchange.put(end)  # For ranks that still calibrate.

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        if report.when != "teardown":
            return None
        measured = [one for one in self._session.benchmarks if one.stats]
        self._session.benchmarks.clear()  # Keep the list itself: fixtures hold its method `append`.
        failed, self._failed = self._failed or any(one.has_error for one in measured), False
        if self._rank or failed or not measured:
            return {"failed": True} if failed else None
        about = {name: getattr(measured[-1], name) for name in _ABOUT}
        seconds = array("d", measured[-1].stats.data).tobytes()
        return {"about": named("pytest_benchmark.utils", "safe_dumps")(about), "seconds": seconds}


class _InDriver:
    """Adds the statistics of a marked test to those of pytest-benchmark's session: one entry for a test."""

    def __init__(self, session: Any, fixture: Any) -> None:
        self._session = session
        self._fixture = fixture

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
        seconds = array("d")
        seconds.frombytes(sent[0]["seconds"])
        made._make_stats(about["iterations"]).stats.data.extend(seconds)
