"""``--accel-advise``: hooks that measure what the tests use, and advice on their marks at the end of the session.

Registered with this option only. The functions that make the advice are pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import Device
from pytest_accel.core.marks import ALL, MarkFinder, as_keywords
from pytest_accel.core.stash_keys import DEVICE_PEAKS, MARKED, OWNERS
from pytest_accel.core.units import count_text, format_memory, parse_memory
from pytest_accel.features.planning.plan_text import clock

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession

GIB = 1024**3
MARGIN = 1.25
"""Factor on the peak of a test's memory: another run of the test may take more."""
RESERVE = GIB
"""Memory of a process that torch does not count: the device's runtime and its libraries."""
MOST_SHARES = 8
"""Most tests that should share a device: more of them mostly wait for each other."""
WAITED = 0.5
"""Seconds: a test that has waited less is not worth a line."""
SHOWN = 10
"""Number of tests with a line on their waiting."""
_RUN = "accel_run"
"""Name of the property with the mark of a test and the seconds that it has waited for its world."""
_TURN = "accel_turn"
"""Attribute of a report: number of earlier tests of the collection with the node id of its test; absent if 0."""


def register(session: AccelSession) -> None:
    """Register the hooks that this process needs: each runs tests or shows the summary, or both."""
    session.config.pluginmanager.register(LateRegistration(), "accel-late-registration")
    if not session.is_worker:
        session.config.pluginmanager.register(AdviseHooks(session), "accel-advice")


class LateRegistration:
    """Registers the :class:`MeasuringHooks` when the tests begin, so that their wrapper is outside of all others."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        session.config.pluginmanager.register(MeasuringHooks(session), "accel-measuring")


class MeasuringHooks:
    """Adds a test's mark, and the time that it has waited for its world, to its reports. One for each driver."""

    def __init__(self, session: pytest.Session) -> None:
        turns = _with_turns([item.nodeid for item in session.items])
        self._turns = {id(item): turn for item, (_, turn) in zip(session.items, turns, strict=True) if turn}
        self._finder = MarkFinder(session.config.stash[OWNERS])
        self._item: pytest.Item | None = None
        """The running test, if it is marked, until its reports begin."""
        self._began = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._item = item if MARKED in item.stash else None
        self._began = monotonic()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Measure the time from the start of the test's protocol: the driver gets the world in between."""
        item, self._item = self._item, None
        if item is not None:
            marks = [as_keywords(mark) for mark in self._finder.find(item) if mark is not None]
            run: dict[str, object] = {"waited": monotonic() - self._began}
            # xdist can send only plain values. There is no advice for tests with two marks.
            if len(marks) == 1 and all(map(_is_plain, marks[0].kwargs.values())):
                run |= {"mark": marks[0].name, "arguments": dict(marks[0].kwargs)}
            item.user_properties.append((_RUN, run))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if (turn := self._turns.get(id(item))) is not None:
            setattr(report, _TURN, turn)
        return report


def _is_plain(value: object) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(one is None or isinstance(one, (int, float, str)) for one in values)


_TestKey = tuple[str, int]
"""Node id of a test, and the number of earlier tests of the collection with the same one."""


@dataclass(slots=True)
class _Test:
    """The reports of one test."""

    seconds: float = 0.0
    """Sum of its phases."""
    passed: bool = True
    ran: bool = False
    """True if its call phase was not skipped."""
    properties: dict[str, Any] = field(default_factory=dict)


class AdviseHooks:
    """Collects the reports of a session's tests, and shows the advice. Registered in the controller."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._tests: dict[_TestKey, _Test] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        key = report.nodeid, getattr(report, _TURN, 0)
        if report.when == "setup" or key not in self._tests:
            self._tests[key] = _Test()  # The last run of a test counts, if it is rerun.
        test = self._tests[key]
        test.seconds += report.duration
        test.passed &= report.passed
        test.ran |= report.when == "call" and not report.skipped
        given: Iterable[tuple[object, object]] = report.user_properties  # pytest accepts names of any type.
        test.properties.update((name, value) for name, value in given if isinstance(name, str))

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("accel: advice (--accel-advise)", sep="-")
        found = (_measurement(nodeid, test) for (nodeid, _), test in sorted(self._tests.items()))
        measurements = [one for one in found if one is not None]
        machine = self._session.machine
        kinds = {one.arguments.get("kind") or machine.session.kind for one in measurements if one.mark == "devices"}
        devices = {device.id: device for kind in kinds - {"none"} for device in machine.of(str(kind)).devices}
        for line in (
            *about_marks(measurements, devices, self._session.settings.share),
            *about_waiting(measurements),
        ):
            terminalreporter.write_line(line)


def _with_turns(nodeids: Iterable[str]) -> list[_TestKey]:
    """Return each of `nodeids` with the number of equal ones before it."""
    turns: Counter[str] = Counter()
    keys = []
    for nodeid in nodeids:
        keys.append((nodeid, turns[nodeid]))
        turns[nodeid] += 1
    return keys


def _measurement(nodeid: str, test: _Test) -> Measurement | None:
    """Return the measurement of a marked test that has passed; None for another test."""
    if not (test.passed and test.ran) or _RUN not in test.properties:
        return None
    run, properties = test.properties[_RUN], test.properties
    return Measurement(
        nodeid,
        run.get("mark"),
        run.get("arguments", {}),
        tuple(properties["accel_devices"].split(",")) if "accel_devices" in properties else (),
        tuple(tuple(properties[name]) for name in properties if name.startswith(DEVICE_PEAKS)),  # By rank.
        test.seconds,
        run["waited"],
    )


@dataclass(frozen=True, slots=True)
class Measurement:
    """The resources that a marked test has used in this session. The test has passed."""

    nodeid: str
    mark: str | None
    """Name of its mark; None if there is no advice for its marks."""
    arguments: Mapping[str, object]
    """The arguments of the mark, by name."""
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


def about_marks(
    measurements: Sequence[Measurement], devices: Mapping[str, Device], default_share: str | None
) -> Iterator[str]:
    """Return lines on marks that ask for more than their tests have used.

    `devices` are the devices of the session by id; `default_share` is the share of tests whose marks have none
    (``--accel-share``).
    """
    used = [one for one in measurements if one.devices and one.mark is not None]
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
    advised = {test: reasons for test, group in groups.items() if (reasons := _advise(group, devices, default_share))}
    if not advised:
        measured = count_text(len(counted), "test")
        yield f"no advice on marks: {measured} measured, and none asks for much more than it has used"
        return
    yield f"marks that ask for more than {count_text(len(counted), 'test')} have used:"
    for test, reasons in advised.items():
        yield f"  {test}: {'; '.join(reasons)}"
    yield (
        f"Each size is the peak plus {MARGIN - 1:.0%}, plus {format_memory(RESERVE)} for what torch does not count. "
        "Memory of other libraries is not measured."
    )


def _advise(group: Sequence[Measurement], devices: Mapping[str, Device], default_share: str | None) -> list[str]:
    """Return the advice for the tests of one function; empty if there is none, or if the tests differ too much."""
    first = group[0]
    if any((one.mark, one.arguments) != (first.mark, first.arguments) or not one.peaks for one in group):
        return []
    peak = max(one.peak for one in group)
    if peak == 0 or first.mark == "distributed":
        return _idle_devices(group)
    of_tests = [devices[id] for one in group for id in one.devices if id in devices]
    sizes = [device.memory for device in of_tests if device.memory]
    can_share = not default_share and sizes and len(sizes) == len(of_tests)
    if not can_share or any(device.single_process for device in of_tests) or "share" in first.arguments:
        return _less_of_devices(group, peak, 1)
    return _less_of_devices(group, peak, min(min(sizes) // _with_margin(peak), MOST_SHARES))


def _idle_devices(group: Sequence[Measurement]) -> list[str]:
    """Return the advice for tests some of whose ranks, or all, have allocated nothing."""
    nothing = "torch has allocated nothing on"
    if all(one.peak == 0 for one in group):
        if group[0].mark == "devices":
            return [f"{nothing} its devices: it needs no mark `devices`"]
        fixed = group[0].arguments.keys() & {"kind", "devices_per_rank", "backend"}
        return [f"{nothing} its devices" + ("" if fixed else ": kind='cpu'")]
    ranks = min(len(one.peaks) for one in group)
    idle = [rank for rank in range(ranks) if all(not any(one.peaks[rank]) for one in group)]
    if not idle:
        return []
    return [f"{nothing} the devices of rank{'s' if len(idle) > 1 else ''} {', '.join(map(str, idle))} of {ranks}"]


def _less_of_devices(group: Sequence[Measurement], peak: int, tests: int) -> list[str]:
    """Return the advice for tests of one process: fewer devices, less memory, a share if several `tests` fit."""
    reasons = []
    given = min(len(one.peaks[0]) for one in group)
    needed = max(position + 1 for one in group for position, size in enumerate(one.peaks[0]) if size)
    if needed < given and group[0].arguments.get("n") != ALL:
        reasons.append(f"torch has allocated nothing on the last {given - needed} of {given} devices: n={needed}")
    size = _with_margin(peak)
    asked = group[0].arguments.get("memory")
    if asked is not None and parse_memory(asked) > 2 * size:
        reasons.append(f"memory={asked!r}, and its peak is {format_memory(peak)}: memory='{size // GIB}GiB'")
    if tests > 1:
        share = math.floor(1000 / tests) / 1000
        reasons.append(f"its peak is {format_memory(peak)}, {tests} such tests fit on a device: share={share}")
    return reasons


def _with_margin(peak: int) -> int:
    """Return the memory that a test with this `peak` should ask for: whole GiB, in bytes."""
    return math.ceil((peak * MARGIN + RESERVE) / GIB) * GIB


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


def _function(nodeid: str) -> str:
    """Return a node id without the parameters of the test."""
    path, colons, names = nodeid.partition("::")
    return path + colons + names.partition("[")[0]
