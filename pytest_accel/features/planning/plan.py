"""``--accel-plan``: collect the suite, run no test, and show how long the tests would take on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.units import count_text
from pytest_accel.features.order.stored_durations import recall
from pytest_accel.features.order.tasks import SLOTS, Need, Task, need_of, planned, seconds_of, tasks_of
from pytest_accel.features.planning.forecast import Span, critical_path, simulate
from pytest_accel.features.planning.selection import skip_reason
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import counted
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession

_EQUALLY_GOOD = 0.02
"""Sessions that take at most this fraction longer than the shortest one count as equally good."""
_SHOWN = 5
"""Number of tests of the critical path that are shown."""


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
        if items and (not session.testsfailed or session.config.option.continue_on_collection_errors):
            from pytest_accel.core.terminal_lines import write_section

            write_section(session.config, "accel: plan", ((line, line.endswith("best")) for line in self._lines(items)))
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
        yield from _about(tasks, machine, getattr(config.option, "numprocesses", None))


def _about(tasks: Sequence[Task], machine: Machine, requested: int | None) -> Iterator[str]:
    """Return a table of the makespan by the number of workers, and the tests that make it long."""
    forecasts: dict[int, list[Span]] = {}
    workers = 1
    while True:
        spans = forecasts[workers] = simulate(tasks, workers)
        if workers >= len(spans) or (
            workers > 1 and spans[-1].end > forecasts[workers // 2][-1].end * (1 - _EQUALLY_GOOD)
        ):
            break
        workers *= 2
    if requested:
        forecasts[requested] = simulate(tasks, requested)
    shortest = min(spans[-1].end for spans in forecasts.values())
    best = min(one for one, spans in forecasts.items() if spans[-1].end <= shortest * (1 + _EQUALLY_GOOD))
    yield ""
    yield f"{'-n':>5}{'makespan':>14}"
    for one, spans in sorted(forecasts.items()):
        yield f"{one:>5}{clock(spans[-1].end):>14}" + ("   best" if one == best else "")
    yield f"best: the fewest workers with a makespan within {_EQUALLY_GOOD:.0%} of the shortest"
    path = critical_path(forecasts[requested or best], tasks)
    longest = sorted(path, key=lambda span: (span.begin - span.end, -span.begin))[:_SHOWN]
    more = f" (the longest {_SHOWN} of {len(path)})" if len(path) > _SHOWN else ""
    yield ""
    yield f"-n {requested or best}: each of these tests starts when the one before it has ended{more}:"
    needs = {span.test: takes(tasks[span.test].need, machine) for span in longest}
    width = max(map(len, needs.values()))
    for span in (span for span in path if span in longest):
        took = f"+{clock(span.end - span.begin)}"
        yield f"{clock(span.begin):>12} {took:>12}  {needs[span.test]:<{width}}  {tasks[span.test].nodeid}"


def takes(need: Need, machine: Machine) -> str:
    """Return a text like ``2 devices`` or ``1 CPU slot``; empty for a test that only needs a worker."""
    return ", ".join(
        counted(count, kind) if kind in machine.resources else count_text(count, SLOTS if kind == SLOTS else "device")
        for kind, count, _ in need
    )


def clock(seconds: float) -> str:
    """Return a duration like ``0.8 s``, ``12 min 05 s`` or ``3 h 05 min``."""
    if seconds < 119.95:
        return f"{seconds:.1f} s" if seconds >= 0.95 or not seconds else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
