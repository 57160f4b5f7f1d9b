"""Text of ``--accel-plan``, made from forecasts. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_accel.core.units import count_text
from pytest_accel.features.planning.forecast import EQUALLY_GOOD, Forecast, SuiteOnMachine, Times, best, critical_path

_SHOWN = 5
"""Number of tests of the critical path that are shown."""
_NARROW = 30
"""Minimum number of columns for a test's name."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs that run a suite on machines of one size."""

    machine: str
    tests: int
    """Number of tests that can run on the machine; the others would be skipped."""
    workers: int
    """Number of xdist workers of each job."""
    forecasts: Sequence[Forecast]
    """The session of each job; none if no number of jobs ends in time."""
    longest: str = ""
    """Node id of the longest test, if there are no jobs."""


Line = tuple[str, bool]
"""A line, and True if it is highlighted."""


def plain(lines: Iterable[str]) -> Iterator[Line]:
    """Return `lines` without highlighting."""
    return ((line, False) for line in lines)


def count_tests(tests: int, skipped: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Return lines with the number of tests to run, and the number skipped for each reason."""
    total = sum(count for _, count in skipped)
    yield f"{count_text(tests, 'test')} to run" + (f", {total} skipped:" if total else "")
    for reason, count in skipped:
        yield f"{count:>5}  {reason}"


def about_times(found: Times) -> Iterator[str]:
    """Return lines that say where the tests' times come from."""
    total = len(found.seconds)
    if found.unknown == total:
        yield f"no times are stored: each test counts as {found.guess:g} s"
    elif found.unknown:
        guess = f"the median of the others, {clock(found.guess)}"
        yield f"{found.unknown} of {count_text(total, 'test')} never timed: counted as {guess}"
    else:
        yield "the times of all tests are stored"
    if found.elsewhere:
        tests = count_text(total, "test")
        yield f"{found.elsewhere} of {tests} timed on another kind of device only: counted with those times"


def table(forecasts: Sequence[Forecast], devices: int) -> Iterator[Line]:
    """Return a table of the session's makespan by the number of workers; the best line is highlighted."""
    chosen = best(forecasts)
    yield "", False
    yield f"{'-n':>5}{'makespan':>14}{'utilisation':>14}" if devices else f"{'-n':>5}{'makespan':>14}", True
    for forecast in forecasts:
        line = f"{forecast.workers:>5}{clock(forecast.makespan):>14}"
        line += f"{forecast.utilisation(devices):>14.0%}" if devices else ""
        yield line + ("   best" if forecast is chosen else ""), forecast is chosen
    yield f"best: the fewest workers with a makespan within {EQUALLY_GOOD:.0%} of the shortest", False


def about(forecast: Forecast, suite: SuiteOnMachine, columns: int) -> Iterator[str]:
    """Return the details of the session with one number of workers, in lines of at most `columns` characters."""
    yield ""
    over = forecast.makespan / suite.lower_bound - 1 if suite.lower_bound else 0.0
    more = f", {over:.0%} above it" if over >= 0.005 else ""
    bound = f"lower bound of any order {clock(suite.lower_bound)}{more}"
    yield f"-n {forecast.workers}: makespan {clock(forecast.makespan)}; {bound}"
    if suite.devices:
        held = suite.devices * forecast.makespan
        hours = f"{forecast.device_seconds / 3600:.3g} device-hours used of {held / 3600:.3g}"
        yield f"{suite.devices} devices: {hours}, utilisation {forecast.utilisation(suite.devices):.0%}"
    links = critical_path(forecast.spans)
    longest = sorted(links, key=lambda span: (span.begin - span.end, -span.begin))[:_SHOWN]
    yield "Critical path: each test started when the one before it ended" + (
        f" (the longest {_SHOWN} of {len(links)}):" if len(links) > _SHOWN else ":"
    )
    width = max([12, *(len(suite.takes(span.index)) for span in longest)])
    for span in links:
        if span in longest:
            taken = suite.takes(span.index)
            head = f"{clock(span.begin):>12} {'+' + clock(span.end - span.begin):>12}  {taken:<{width}} "
            yield head + _shortened(suite.collection[span.index], max(_NARROW, columns - len(head) - 1))


def parts(forecasts: Sequence[Forecast]) -> Iterator[Line]:
    """Return a table of the parts of the suite, one for each job of ``--accel-shard``."""
    slowest = max(forecast.makespan for forecast in forecasts)
    mean = sum(forecast.makespan for forecast in forecasts) / len(forecasts)
    yield "", False
    yield f"{len(forecasts)} jobs with -n {forecasts[0].workers} each:", False
    yield f"{'part':>8}{'tests':>8}{'makespan':>14}", True
    for number, forecast in enumerate(forecasts, 1):
        yield f"{f'{number}/{len(forecasts)}':>8}{len(forecast.spans):>8}{clock(forecast.makespan):>14}", False
    if mean:
        yield f"the slowest takes {slowest / mean - 1:.0%} more than the mean", False


def jobs(rows: Sequence[Jobs], limit: float) -> Iterator[Line]:
    """Return a table of how many jobs end within `limit` seconds, by the machine on which each runs."""
    yield "", False
    yield f"jobs that end within {clock(limit)}, without their own start:", False
    yield f"{'machine':>12}{'tests':>8}{'-n':>6}{'jobs':>6}{'slowest':>14}{'device-hours':>14}", True
    for row in rows:
        head = f"{row.machine:>12}{row.tests:>8}"
        if row.forecasts:
            hours = sum(forecast.device_seconds for forecast in row.forecasts) / 3600
            slowest = clock(max(forecast.makespan for forecast in row.forecasts))
            yield f"{head}{row.workers:>6}{len(row.forecasts):>6}{slowest:>14}{hours:>14.3g}", False
        elif row.tests:
            yield f"{head}  none: {row.longest} alone takes too long", False
        else:
            yield f"{head}  none can run here", False


def clock(seconds: float) -> str:
    """Return a duration like ``0.8 s``, ``12 min 05 s`` or ``3 h 05 min``."""
    if seconds < 119.95:
        return f"{seconds:.1f} s" if seconds >= 0.95 or not seconds else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _shortened(nodeid: str, length: int) -> str:
    return nodeid if len(nodeid) <= length else f"…{nodeid[1 - length :]}"
