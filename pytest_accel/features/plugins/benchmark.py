"""pytest-benchmark: statistics of marked tests, from rank 0, in the session's table and files.

pytest-benchmark measures a function for as many rounds as fit into a given time. The ranks of a test measure different
times, but a function with a collective must run equally often on all of them. Therefore rank 0 calibrates, and
announces each step to the other ranks before it runs.
"""

from __future__ import annotations

import json
import pstats
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.features.plugins.unknown_releases import WithoutBridge, require, take
from pytest_accel.rank.context import RANK

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

WITHOUT = WithoutBridge(
    "pytest-benchmark",
    "the statistics, and their functions run once",
    "ranks would run functions unequally often",
    lambda config, items: not hasattr(config.pluginmanager.get_plugin(_NAME), "disabled"),
)

_NAME = "pytest-benchmark"
"""The name of the plugin, and of its session, which it registers with pytest."""
_FIXTURE = ("_calibrate_timer", "_make_stats", "_save_cprofile")
_SESSION = ("benchmarks", "options", "disabled", "logger")
_BLOCK = 10
"""Rounds that rank 0 announces at once while it measures until the mean is precise."""
_RANK_STATISTICS = ("min", "max", "mean", "stddev", "median", "rounds")
"""The statistics of each rank in ``extra_info``."""


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that measures in a rank."""
    return _InRank(config, _session(config))


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that adds the ranks' statistics to the session's."""
    return _InDriver(_session(config))


def without_bridge(config: pytest.Config) -> None:
    """Have a rank run functions once: ranks that measure by themselves would run them unequally often."""
    session: Any = config.pluginmanager.get_plugin(_NAME)
    session.disabled = True


def _session(config: pytest.Config) -> Any:
    session = config.pluginmanager.get_plugin(_NAME)
    require(_fixture_class(), *_FIXTURE)
    require(session, *_SESSION)
    return session


def _fixture_class() -> Any:
    return take("pytest_benchmark.fixture", "BenchmarkFixture")


class _InRank:
    """Sends the statistics of the fixture `benchmark` from a rank, and has all ranks run as many rounds as rank 0."""

    def __init__(self, config: pytest.Config, session: Any) -> None:
        self._context = config.stash[RANK]
        self._session = session
        # The driver writes the profiles, and measures nothing where xdist distributes its tests.
        session.options["cprofile_dump"] = False
        session.disabled = session.disabled or self._context.session.distributed
        self._agreement = _Agreement(self._context)
        if self._context.spec.ranks > 1:
            self._agreement.install()

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        if report.when != "teardown":
            has_run = report.when == "call" or not report.passed
            # Any test may measure: `getfixturevalue` requests the fixture without naming it in the signature.
            if has_run and not self._session.disabled:
                self._agreement.leave("failed" if report.failed else "leave")
            return None
        measured = list(self._session.benchmarks)
        self._session.benchmarks.clear()  # Keep the list itself: fixtures hold its method `append`.
        failed = self._agreement.take_failure() or any(one.has_error for one in measured)
        about = _to_data(measured[-1]) if measured and measured[-1].stats else {}
        return {"failed": failed, **about} if failed or about else None


def _to_data(measured: Any) -> dict[str, Any]:
    """Return the statistics `measured` of one test as plain data."""
    safe_dumps = take("pytest_benchmark.utils", "safe_dumps")
    names = ("name", "fullname", "group", "extra_info", "iterations")
    return {
        "about": safe_dumps({name: getattr(measured, name) for name in names}),
        "seconds": array("d", measured.stats.data).tobytes(),
        "profile": _profile_to_data(measured.cprofile_stats) if measured.cprofile_stats else None,
    }


def _profile_to_data(stats: pstats.Stats) -> list[Any]:
    """Return `stats` as plain data: for each function its name, its numbers, and the numbers of each caller."""
    found: dict[Any, Any] = stats.stats  # type: ignore[attr-defined]
    return [(name, numbers, list(callers.items())) for name, (*numbers, callers) in found.items()]


class _Profile:
    """A finished profile that was sent as `_profile_to_data` makes it, with the interface that `pstats.Stats` needs."""

    def __init__(self, data: list[Any]) -> None:
        self.stats = {tuple(name): (*numbers, dict(callers)) for name, numbers, callers in data}

    def create_stats(self) -> None:
        """Do nothing: `pstats.Stats` calls this to finish a profile, and this one is finished."""


class _InDriver:
    """Adds the statistics of a marked test to those of pytest-benchmark's session: one entry for a test."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        measured = {rank: one for rank, one in sent.items() if "about" in one}
        if not measured:
            return
        first = next(iter(measured.values()))
        about = json.loads(first["about"])
        fixture = self._fixture(item)
        fixture.name, fixture.fullname, fixture.group = about["name"], about["fullname"], about["group"]
        fixture.has_error = any(one["failed"] for one in sent.values())
        fixture.extra_info = about["extra_info"]
        if len(measured) > 1:
            fixture.extra_info["accel_ranks"] = {
                str(rank): _statistics(_seconds(one["seconds"])) for rank, one in measured.items()
            }
        stats = fixture._make_stats(about["iterations"])
        stats.stats.data.extend(_seconds(first["seconds"]))
        if first["profile"] is not None:
            fixture._save_cprofile(_Profile(first["profile"]))

    def _fixture(self, item: pytest.Item) -> Any:
        """Return the fixture that pytest-benchmark would have made for `item` in this process."""
        session = self._session
        mark = item.get_closest_marker("benchmark")
        options = {**session.options, **(mark.kwargs if mark else {})}
        if mark and "timer" in mark.kwargs:
            options["timer"] = take("pytest_benchmark.utils", "NameWrapper")(mark.kwargs["timer"])
        return _fixture_class()(
            item,
            add_stats=session.benchmarks.append,
            logger=session.logger,
            warner=item.warn,
            disabled=session.disabled,
            **options,
        )


def _seconds(data: bytes) -> list[float]:
    found = array("d")
    found.frombytes(data)
    return found.tolist()


def _statistics(seconds: list[float]) -> dict[str, float]:
    """Return the statistics of one rank."""
    stats = take("pytest_benchmark.stats", "Stats")()
    stats.data.extend(seconds)
    return {name: getattr(stats, name) for name in _RANK_STATISTICS}


class BenchmarkError(Exception):
    """A rank cannot take the number of rounds from rank 0."""

    __module__ = "pytest_accel"  # Reports show it.


class RankZeroFailed(BenchmarkError):
    """Rank 0 has failed in the benchmark. The failure of another rank that says so is a consequence of that."""

    __module__ = "pytest_accel"


class _Agreement:
    """Has all ranks of a test run a measured function equally often: rank 0 announces steps, and the others follow.

    Rank 0 does not wait for other ranks, so that a test may measure on rank 0 alone.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._test = 0
        """The number of the test that was measured last."""
        self._steps = 0
        """The number of steps of that test that this rank has announced (rank 0) or received."""
        self._failed = False
        """True if the measured function has raised since the last call of `take_failure`."""

    def install(self) -> None:
        """Replace the methods of the fixture that choose the number of rounds by time."""
        fixture = _fixture_class()
        calibrate = fixture._calibrate_timer
        until_precise = getattr(fixture, "_run_until_precise", None)  # Since 5.3.

        def calibrate_together(one: Any, runner: Callable[..., Any]) -> Any:
            __tracebackhide__ = True
            return self._calibrate(one, calibrate, runner)

        def run_together(one: Any, *args: Any) -> None:
            __tracebackhide__ = True
            assert until_precise is not None
            self._run_until_precise(one, until_precise, *args)

        fixture._calibrate_timer = calibrate_together
        if until_precise is not None:
            fixture._run_until_precise = run_together

    def leave(self, why: str) -> None:
        """In rank 0, announce to waiting ranks that it does not measure; `why` is ``failed`` or ``leave``."""
        if self._context.rank == 0 and self._context.spec.ranks > 1 and self._test != self._context.tests:
            self._announce(why)

    def take_failure(self) -> bool:
        """Return whether the measured function has raised since the last call, perhaps before there were statistics."""
        failed, self._failed = self._failed, False
        return failed

    def _calibrate(self, fixture: Any, original: Callable[..., Any], runner: Callable[..., Any]) -> Any:
        __tracebackhide__ = True

        def announced(loops: range) -> Any:
            __tracebackhide__ = True
            self._announce("run", loops=len(loops), rounds=1)
            return runner(loops)

        if self._context.rank == 0:
            duration, loops, loops_range = self._lead(original, fixture, announced)
            self._announce("end", loops=loops, seconds=float(duration))
            return duration, loops, loops_range
        end = self._follow(runner)
        return end["seconds"], end["loops"], range(end["loops"])

    def _run_until_precise(
        self,
        fixture: Any,
        original: Callable[..., Any],
        runner: Callable[..., Any],
        loops: range,
        stats: Any,
        most: int,
    ) -> None:
        __tracebackhide__ = True
        announced = 0

        def in_blocks(loops: range) -> Any:
            __tracebackhide__ = True
            nonlocal announced
            done = len(stats.stats.data)
            if done == announced:
                block = min(_BLOCK, most - done)
                self._announce("run", loops=len(loops), rounds=block)
                announced += block
            return runner(loops)

        def measure() -> None:
            __tracebackhide__ = True
            original(fixture, in_blocks, loops, stats, most)
            while len(stats.stats.data) < announced:  # The other ranks run all rounds of the last block.
                stats.update(runner(loops))

        if self._context.rank == 0:
            self._lead(measure)
            self._announce("end")
        else:
            self._follow(lambda loops: stats.update(runner(loops)))

    def _lead(self, original: Callable[..., Any], *args: Any) -> Any:
        """Call `original` in rank 0. If it raises, announce that, because the other ranks wait for the next step."""
        __tracebackhide__ = True
        try:
            return original(*args)
        except BaseException:
            self._failed = True
            self._announce("failed")
            raise

    def _follow(self, run: Callable[[range], object]) -> dict[str, Any]:
        """Run what rank 0 announces, until it announces the end; return that step."""
        __tracebackhide__ = True
        while True:
            step = self._receive()
            if step["does"] == "end":
                return step
            if step["does"] == "leave":
                raise BenchmarkError(
                    f"rank {self._context.rank} runs a benchmark that rank 0 does not run, but rank 0 sets the number "
                    "of rounds; use benchmark.pedantic(..., rounds=N), or run the benchmark on rank 0 as well"
                )
            if step["does"] == "failed":
                raise RankZeroFailed("rank 0 has failed and runs no more of the benchmark")
            try:
                for _ in range(step["rounds"]):
                    run(range(step["loops"]))
            except BaseException:
                self._failed = True
                raise

    def _announce(self, does: str, **details: float) -> None:
        store = self._store
        previous = [] if self._test == self._context.tests else [self._name(step) for step in range(self._steps)]
        for name in previous:  # All ranks have finished that test.
            store.delete(name)
        store.set(self._next(), json.dumps({"does": does, **details}).encode())

    def _receive(self) -> dict[str, Any]:
        __tracebackhide__ = True
        step: dict[str, Any] = json.loads(self._store.get(self._next()))
        return step

    def _next(self) -> str:
        """Return the name of the next step in the world's store."""
        if self._test != self._context.tests:
            self._test, self._steps = self._context.tests, 0
        self._steps += 1
        return self._name(self._steps - 1)

    def _name(self, step: int) -> str:
        return f"benchmark/{self._test}/{step}"

    @property
    def _store(self) -> Any:
        store = self._context.signed_store
        assert store is not None
        return store
