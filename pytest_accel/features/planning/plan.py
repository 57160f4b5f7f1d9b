"""``--accel-plan``: collect the suite, run no test, and show how long the tests would take on a machine."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.units import count_text
from pytest_accel.driver.items import marked_of
from pytest_accel.features.order.stored_durations import recall
from pytest_accel.features.planning.forecast import EQUALLY_GOOD, Forecast, SuiteOnMachine, Times, best
from pytest_accel.features.planning.selection import divide, runnable, skip_reason, suite_of
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession

_SHOWN = 5
"""Number of tests of the critical path that are shown."""
_NARROW = 30
"""Minimum number of columns for a test's name."""


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
        planned = [(item, None if (marked := marked_of(item)) is None else marked.plan) for item in items]
        skipped = Counter(reason for reason in (skip_reason(*one) for one in planned) if reason is not None)
        tests = runnable(planned)
        yield f"{count_text(len(tests), 'test')} to run" + (f", {skipped.total()} skipped:" if skipped else "")
        for reason, count in skipped.most_common():
            yield f"{count:>5}  {reason}"
        if not tests:
            return
        suite = suite_of(tests, recall(config), machine)
        yield from _about_times(suite.times)
        if options.planned_machine(config) is not None:
            yield "requirements for memory, capability and name are assumed to be met"
        forecasts = list(suite.forecasts())
        chosen = best(forecasts)
        if requested := getattr(config.option, "numprocesses", None):
            forecasts = sorted([*forecasts, suite.forecast(requested)], key=lambda one: one.workers)
            forecasts = list({one.workers: one for one in forecasts}.values())
            chosen = next(one for one in forecasts if one.workers == requested)
        yield from _table(forecasts, suite.devices)
        yield from _about(chosen, suite, shutil.get_terminal_size().columns)
        if self._session.settings.shard is not None:
            parts = divide(planned, config, machine, self._session.settings.shard[1], chosen.workers)
            suites = (
                suite_of(runnable([one for one in planned if one[0] in part]), recall(config), machine)
                for part in map(set, parts)
            )
            yield from _parts([one.forecast(chosen.workers) for one in suites])


def _about_times(found: Times) -> Iterator[str]:
    """Return lines that say where the tests' times come from."""
    tests = count_text(len(found.seconds), "test")
    if found.unknown == len(found.seconds):
        yield f"no times are stored: each test counts as {found.guess:g} s"
    elif found.unknown:
        yield f"{found.unknown} of {tests} never timed: counted as the median of the others, {clock(found.guess)}"
    else:
        yield "the times of all tests are stored"
    if found.elsewhere:
        yield f"{found.elsewhere} of {tests} timed on another kind of device only: counted with those times"


def _table(forecasts: Sequence[Forecast], devices: int) -> Iterator[str]:
    """Return a table of the session's makespan by the number of workers."""
    chosen = best(forecasts)
    yield ""
    yield f"{'-n':>5}{'makespan':>14}" + (f"{'utilisation':>14}" if devices else "")
    for one in forecasts:
        line = f"{one.workers:>5}{clock(one.makespan):>14}"
        line += f"{one.device_seconds / (devices * one.makespan or 1):>14.0%}" if devices else ""
        yield line + ("   best" if one is chosen else "")
    yield f"best: the fewest workers with a makespan within {EQUALLY_GOOD:.0%} of the shortest"


def _about(forecast: Forecast, suite: SuiteOnMachine, columns: int) -> Iterator[str]:
    """Return the details of the session with one number of workers, in lines of at most `columns` characters."""
    over = forecast.makespan / suite.lower_bound - 1 if suite.lower_bound else 0.0
    yield ""
    yield (
        f"-n {forecast.workers}: makespan {clock(forecast.makespan)}; lower bound of any order "
        f"{clock(suite.lower_bound)}" + (f", {over:.0%} above it" if over >= 0.005 else "")
    )
    if suite.devices:
        hours = forecast.device_seconds / 3600, suite.devices * forecast.makespan / 3600
        yield "{} devices: {:.3g} device-hours used of {:.3g}".format(suite.devices, *hours)
    path = forecast.critical_path()
    longest = sorted(path, key=lambda span: (span.begin - span.end, -span.begin))[:_SHOWN]
    more = f" (the longest {_SHOWN} of {len(path)})" if len(path) > _SHOWN else ""
    yield f"Critical path: each test started when the one before it ended{more}:"
    width = max([12, *(len(suite.takes(span.index)) for span in longest)])
    for span in path:
        if span in longest:
            head = (
                f"{clock(span.begin):>12} {'+' + clock(span.end - span.begin):>12}  {suite.takes(span.index):<{width}} "
            )
            name, room = suite.collection[span.index], max(_NARROW, columns - len(head) - 1)
            yield head + (name if len(name) <= room else f"…{name[1 - room :]}")


def _parts(forecasts: Sequence[Forecast]) -> Iterator[str]:
    """Return a table of the parts of the suite, one for each job of ``--accel-shard``."""
    times: Iterable[float] = [forecast.makespan for forecast in forecasts]
    yield ""
    yield f"{len(forecasts)} jobs with -n {forecasts[0].workers} each:"
    yield f"{'part':>8}{'tests':>8}{'makespan':>14}"
    for number, one in enumerate(forecasts, 1):
        yield f"{f'{number}/{len(forecasts)}':>8}{len(one.spans):>8}{clock(one.makespan):>14}"
    if mean := sum(times) / len(forecasts):
        yield f"the slowest takes {max(times) / mean - 1:.0%} more than the mean"


def clock(seconds: float) -> str:
    """Return a duration like ``0.8 s``, ``12 min 05 s`` or ``3 h 05 min``."""
    if seconds < 119.95:
        return f"{seconds:.1f} s" if seconds >= 0.95 or not seconds else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
