"""``--accel-plan``: collect the suite, run no test, and show how long the tests would take on a machine."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.units import count_text
from pytest_accel.features.order.scheduler import RunOrder
from pytest_accel.features.order.stored_durations import recall
from pytest_accel.features.order.tasks import Task, need_of, planned, seconds_of, tasks_of
from pytest_accel.features.planning.division import skip_reason
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession

_EQUALLY_GOOD = 0.02
"""Sessions that take at most this fraction longer than the shortest one count as equally good."""


class PlanHooks:
    """Hooks of ``--accel-plan``, registered in the process that has the terminal."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Show the plan instead of the list of tests that pytest shows with ``--collect-only``."""
        items, session.items = session.items, []
        try:
            result = yield
        finally:
            session.items = items
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        shows = not session.testsfailed or session.config.option.continue_on_collection_errors
        if items and shows and reporter is not None:
            reporter.section("accel: plan", sep="-")
            for line in self._lines(items):
                reporter.write_line(line, bold=line.endswith("best"))
        return result

    def _lines(self, items: Sequence[pytest.Item]) -> Iterator[str]:
        config, machine = self._session.config, self._session.machine
        found = planned(items)
        skipped = Counter(reason for one in found if (reason := skip_reason(*one)) is not None)
        tests = [one for one in found if skip_reason(*one) is None]
        yield f"{count_text(len(tests), 'test')} to run" + (f", {skipped.total()} skipped:" if skipped else "")
        for reason, count in skipped.most_common():
            yield f"{count:>5}  {reason}"
        if not tests:
            return
        needs = [need_of(item, plan, machine) for item, plan in tests]
        tasks = tasks_of([item.nodeid for item, _ in tests], needs, recall(config))
        untimed = [seconds for one, seconds in zip(tasks, seconds_of(tasks), strict=True) if one.seconds is None]
        if untimed:
            yield f"{len(untimed)} of {len(tasks)} never timed: counted as {clock(untimed[0])}"
        if options.planned_machine(config) is not None:
            yield "requirements for memory, capability and name are assumed to be met"
        yield from _table(tasks, getattr(config.option, "numprocesses", None))


def _table(tasks: Sequence[Task], requested: int | None) -> Iterator[str]:
    """Return a table of the makespan by the number of workers."""
    forecasts: dict[int, float] = {}
    workers = 1
    while True:
        forecasts[workers] = makespan(tasks, workers)
        if workers >= len(tasks) or (
            workers > 1 and forecasts[workers] > forecasts[workers // 2] * (1 - _EQUALLY_GOOD)
        ):
            break
        workers *= 2
    if requested:
        forecasts[requested] = makespan(tasks, requested)
    shortest = min(forecasts.values())
    best = min(one for one, seconds in forecasts.items() if seconds <= shortest * (1 + _EQUALLY_GOOD))
    yield ""
    yield f"{'-n':>5}{'makespan':>14}"
    for one, seconds in sorted(forecasts.items()):
        yield f"{one:>5}{clock(seconds):>14}" + ("   best" if one == best else "")
    yield f"best: the fewest workers with a makespan within {_EQUALLY_GOOD:.0%} of the shortest"


def clock(seconds: float) -> str:
    """Return a duration like ``0.8 s``, ``12 min 05 s`` or ``3 h 05 min``."""
    if seconds < 119.95:
        return f"{seconds:.1f} s" if seconds >= 0.95 or not seconds else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def makespan(tasks: Sequence[Task], workers: int) -> float:
    """Return the seconds that all tests take in a simulated session with ``-n workers``."""
    order, seconds, now = RunOrder(tasks, workers), seconds_of(tasks), 0.0
    ends: list[tuple[float, int]] = []
    order.idle += reversed(range(workers))
    while True:
        for worker, index in order.started():
            heapq.heappush(ends, (now + seconds[index], worker))
        if not ends:
            return now
        now, worker = heapq.heappop(ends)
        order.end(worker)
        order.idle.append(worker)
