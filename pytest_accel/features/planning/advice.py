"""The advice of ``--accel-advise``, made from what the tests of a session have used. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_accel.core.device import Device
from pytest_accel.core.marks import as_keywords, first_argument
from pytest_accel.core.units import count_text, format_memory, parse_memory
from pytest_accel.features.adoption import marker_rules
from pytest_accel.features.planning.forecast import Forecast, SuiteOnMachine, best
from pytest_accel.features.planning.plan_text import clock

GIB = 1024**3
MARGIN = 1.25
"""Factor on the peak of a test's memory: another run of the test may take more."""
RESERVE = GIB
"""Memory of a process that torch does not count: the device's runtime and its libraries."""
MOST_SHARES = 8
"""Most tests that should share a device: more of them mostly wait for each other."""
WORKER_START = 1.0
"""Seconds: an xdist worker takes about as long to start, which the plan does not count."""
WAITED = 0.5
"""Seconds: a test that has waited less is not worth a line."""
SHOWN = 10
"""Number of tests with a line on their waiting."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The resources that a marked test has used in this session. The test has passed."""

    nodeid: str
    marks: tuple[str, ...]
    """As a rule has them: ``devices(1, share=0.25)``."""
    by_rule: bool
    """True if rules have given the test all its marks."""
    devices: tuple[str, ...]
    """Ids of the devices of all ranks."""
    peaks: tuple[tuple[int, ...], ...]
    """Peak of the memory that torch has allocated on each device, in bytes, by rank; empty if torch does not count."""
    seconds: float
    """Time of its phases in the ranks."""
    waited: float
    """Time until it had its devices and ranks, in seconds."""

    @property
    def peak(self) -> int:
        """The largest peak on any of its devices, in bytes."""
        return max((peak for rank in self.peaks for peak in rank), default=0)


@dataclass(frozen=True, slots=True)
class _Change:
    """The advice for one test, or for all tests of one parametrized function."""

    test: str
    """Node id without parameters."""
    reasons: tuple[str, ...]
    mark: str | None
    """The better mark; None if there is none to write."""
    by_rule: bool


def about_marks(
    measurements: Sequence[Measurement], devices: Mapping[str, Device], default_share: int | None
) -> Iterator[str]:
    """Return lines on marks that ask for more than their tests have used.

    `devices` are the devices of the session by id; `default_share` is the number of tests that share a device if their
    marks have no ``share`` (``--accel-share``).
    """
    used = [one for one in measurements if one.devices and len(one.marks) == 1]
    counted = [one for one in used if one.peaks]
    if not counted:
        reason = (
            "torch does not count the memory of these devices" if used else "no test with one mark passed on a device"
        )
        yield f"no advice on marks: {reason}"
        return
    groups: dict[str, list[Measurement]] = {}
    for one in used:
        groups.setdefault(_function(one.nodeid), []).append(one)
    changes = [
        change for test, group in groups.items() if (change := _change(test, group, devices, default_share)) is not None
    ]
    if not changes:
        measured = count_text(len(counted), "test")
        yield f"no advice on marks: {measured} measured, and none asks for much more than it has used"
        return
    yield f"marks that ask for more than {count_text(len(counted), 'test')} have used:"
    for change in changes:
        yield f"  {change.test}: {'; '.join(change.reasons)}"
    yield (
        f"Each size is the peak plus {MARGIN - 1:.0%}, plus {format_memory(RESERVE)} for what torch does not count. "
        "Memory of other libraries is not measured."
    )
    for title, by_rule, form in (
        (
            "for accel_rules in the ini file, above the rules that are there:",
            True,
            "    {}: {}",
        ),
        ("for the test files (rules do not replace marks in them):", False, "    {}: @pytest.mark.{}"),
    ):
        lines = [form.format(one.test, one.mark) for one in changes if one.mark is not None and one.by_rule is by_rule]
        if lines:
            yield title
            yield from lines


def _change(
    test: str, group: Sequence[Measurement], devices: Mapping[str, Device], default_share: int | None
) -> _Change | None:
    """Return the advice for the tests of one function; None if there is none, or if the tests differ too much."""
    first = group[0]
    if any(one.marks != first.marks or not one.peaks for one in group):
        return None
    try:
        (rule,) = marker_rules.parse([f"{test}: {first.marks[0]}"])
    except marker_rules.RuleError:
        return None  # An argument is not a literal, so no rule can have it.
    name, arguments = rule.mark.name, dict(as_keywords(rule.mark.mark).kwargs)
    peak = max(one.peak for one in group)
    change = _less_devices if peak == 0 or name == "distributed" else _less_of_devices
    sizes = [devices[id].memory for one in group for id in one.devices if id in devices]
    known = [size for size in sizes if size] if all(sizes) else []
    alone = any(devices[id].single_process for one in group for id in one.devices if id in devices)
    share = 1 if default_share or alone or not known else min(known) // _with_margin(peak)
    return change(test, group, name, arguments, share)


def _less_devices(
    test: str, group: Sequence[Measurement], name: str, arguments: dict[str, object], _: int
) -> _Change | None:
    """Return the advice for tests some of whose ranks, or all, have allocated nothing."""
    by_rule = all(one.by_rule for one in group)
    if all(one.peak == 0 for one in group):
        reason = "torch has allocated nothing on its devices"
        if name == "devices":
            return _Change(test, (f"{reason}: it needs no mark `devices`",), None, by_rule)
        if arguments.keys() & {"device", "devices_per_rank", "backend"}:
            return _Change(test, (reason,), None, by_rule)
        return _Change(test, (f"{reason}: device='cpu'",), _text(name, {**arguments, "device": "cpu"}), by_rule)
    ranks = min(len(one.peaks) for one in group)
    idle = [rank for rank in range(ranks) if all(not any(one.peaks[rank]) for one in group)]
    if not idle:
        return None
    who = f"rank{'s' if len(idle) > 1 else ''} {', '.join(map(str, idle))} of {ranks}"
    return _Change(test, (f"torch has allocated nothing on the devices of {who}",), None, by_rule)


def _less_of_devices(
    test: str, group: Sequence[Measurement], name: str, arguments: dict[str, object], share: int
) -> _Change | None:
    """Return the advice for tests of one process: fewer devices, less memory, a share of each device."""
    peak = max(one.peak for one in group)
    reasons = []
    better = dict(arguments)
    given = min(len(one.peaks[0]) for one in group)
    needed = max(position + 1 for one in group for position, size in enumerate(one.peaks[0]) if size)
    if needed < given:
        reasons.append(f"torch has allocated nothing on the last {given - needed} of {given} devices: n={needed}")
        better["n"] = needed
    size = _with_margin(peak)
    asked = arguments.get("memory")
    if asked is not None and parse_memory(asked) > 2 * size:
        better["memory"] = f"{size // GIB}GiB"
        reasons.append(f"memory={asked!r}, and its peak is {format_memory(peak)}: memory={better['memory']!r}")
    if share > 1 and "share" not in arguments:
        tests = min(share, MOST_SHARES)
        better["share"] = math.floor(1000 / tests) / 1000
        reasons.append(
            f"its peak is {format_memory(peak)}, {tests} such tests fit on a device: share={better['share']}"
        )
    if not reasons:
        return None
    return _Change(test, tuple(reasons), _text(name, better), all(one.by_rule for one in group))


def _with_margin(peak: int) -> int:
    """Return the memory that a test with this `peak` should ask for: whole GiB, in bytes."""
    return math.ceil((peak * MARGIN + RESERVE) / GIB) * GIB


def _text(name: str, arguments: Mapping[str, object]) -> str:
    """Return a mark, with its first argument by position."""
    first = first_argument(name)
    words = [repr(arguments[first])] if first in arguments else []
    return f"{name}({', '.join([*words, *(f'{key}={value!r}' for key, value in arguments.items() if key != first)])})"


def about_waiting(measurements: Sequence[Measurement]) -> Iterator[str]:
    """Return lines on the tests that have waited for devices and ranks longer than they ran."""
    if not measurements:
        return
    waited = sum(one.waited for one in measurements)
    ran = sum(one.seconds for one in measurements)
    tests = count_text(len(measurements), "test")
    yield f"{tests} ran for {clock(ran)} and waited for devices and new ranks for {clock(waited)}"
    slow = [one for one in measurements if one.waited > max(WAITED, one.seconds)]
    slow.sort(key=lambda one: -one.waited)
    for one in slow[:SHOWN]:
        yield f"  {one.nodeid}: ran for {clock(one.seconds)}, waited for {clock(one.waited)}"
    if len(slow) > SHOWN:
        yield f"  and {count_text(len(slow) - SHOWN, 'test')} more that waited longer than they ran"


def about_workers(suite: SuiteOnMachine, forecasts: Sequence[Forecast], workers: int) -> Iterator[str]:
    """Return a line on the best number of workers; `workers` is the number of this session, 1 without xdist."""
    chosen = best(forecasts)
    now = next((one for one in forecasts if one.workers == workers), None) or suite.forecast(workers)
    if chosen.workers >= now.workers and now.makespan - chosen.makespan < WORKER_START:
        yield f"no advice on -n: by the plan, none saves a second of the {clock(now.makespan)} with -n {workers}"
        return
    yield (
        f"-n {chosen.workers} is the best by the plan: {clock(chosen.makespan)} for the tests, "
        f"and {clock(now.makespan)} with -n {workers} (--accel-plan shows more)"
    )


def _function(nodeid: str) -> str:
    """Return a node id without the parameters of the test."""
    path, colons, names = nodeid.partition("::")
    return path + colons + names.partition("[")[0]
