"""What happened in one or several recorded sessions: the runs of tests, the worlds, and the use of devices over time.

Pure functions of the events. Times are seconds since the epoch, of the clock of the machine that reported them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Literal, NamedTuple

import msgspec

from pytest_accel.core.record_events import (
    DeviceFound,
    MachineFound,
    PhaseReported,
    RankPlace,
    RequestEnded,
    RequestWaits,
    SessionFinished,
    SessionStarted,
    TestStarted,
    WorldAcquired,
    WorldEnding,
    WorldGone,
    WorldReady,
    WorldRequested,
    WorldStarting,
)
from pytest_accel.features.record.record_file import Recorded

StepKind = Literal["test", "wait", "ranks", "other"]
"""A test ran, it waited for devices or slots, its ranks were started, or none of these."""
Verdict = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed", "rerun", "unfinished"]
"""The verdict on one run of a test: pytest's, ``rerun`` if another run follows, or ``unfinished`` without an end."""


class Period(NamedTuple):
    """A period."""

    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


class Lane(NamedTuple):
    """Something that tests run on: a device, or a CPU slot of a session. Sessions on one machine share its devices."""

    host: str
    kind: str
    """The kind of the device; ``slot`` for a CPU slot."""
    name: str
    """The id of the device, or the number of the slot."""
    session: int | None = None
    """The session of a slot, by its position; None for a device."""


@dataclass(slots=True)
class WorldLife:
    """The ranks in which tests have run, from their start to their end."""

    number: int
    about: str
    """The world in a few words."""
    ranks: tuple[RankPlace, ...]
    starting: float
    ready: float | None = None
    """Time at which its processes had started; None if they never had."""
    gone: float | None = None
    """Time at which its processes had ended; None if the record ends before."""
    pids: tuple[int, ...] = ()
    why_ended: str = ""
    killed: bool = False


@dataclass(slots=True)
class Wait:
    """The wait of a test for its world."""

    requested: float
    leased: float | None = None
    """Time at which it had its devices or CPU slots; None if that never happened."""
    acquired: float | None = None
    """Time at which it had its world; None if that never happened."""
    world: WorldLife | None = None
    why: str = ""
    """The reason for a wait, with the holders of the devices if they are known."""
    failed: str = ""
    """Why the request ended without a world."""
    ended: float | None = None
    """Time at which it ended without a world; None if it did not."""


@dataclass(slots=True)
class TestRun:
    """One run of a test. A test that a plugin runs again has several."""

    __test__ = False  # pytest would collect the class.

    test: str
    started: float
    phases: list[PhaseReported] = field(default_factory=list)
    wait: Wait | None = None
    """The wait for its world; None if it used the world of the test before it, or needs none."""
    world: WorldLife | None = None
    lanes: tuple[tuple[Lane, float], ...] = ()
    """The devices or CPU slots that the test ran on, and its share of each."""
    until: float | None = None
    """Time at which its process crashed or the record ended, for a test that was running then; else None."""

    @property
    def verdict(self) -> Verdict:
        failed = [phase.when for phase in self.phases if phase.outcome == "failed"]
        if failed:
            return "error" if set(failed) <= {"setup", "teardown"} else "failed"
        if any(phase.outcome not in ("passed", "skipped") for phase in self.phases):
            return "rerun"
        skipped = [phase for phase in self.phases if phase.outcome == "skipped"]
        if skipped:
            return "skipped" if skipped[0].xfail is None else "xfailed"
        call = next((phase for phase in self.phases if phase.when == "call"), None)
        if call is None:
            return "unfinished"
        return "passed" if call.xfail is None else "xpassed"

    @property
    def worker(self) -> str:
        """The name of xdist's worker; empty without xdist."""
        return next((phase.worker for phase in self.phases), "")

    @property
    def failure(self) -> PhaseReported | None:
        """The first phase that failed; None if none did."""
        return next((phase for phase in self.phases if phase.headline or phase.failure), None)

    @property
    def skip(self) -> str:
        """The reason of a skip; empty for a test that ran."""
        return next((phase.skip for phase in self.phases if phase.skip is not None), "")

    @property
    def missing(self) -> str:
        """The missing hardware that is the reason of a skip; empty if it is none."""
        return next((phase.missing for phase in self.phases if phase.missing is not None), "")

    @property
    def is_marked(self) -> bool:
        """True if the test needs ranks or devices."""
        return bool(self.wait or self.world or self.missing)

    @property
    def peak(self) -> int | None:
        """The highest peak of device memory of a rank in bytes; None if it was not measured."""
        return max(chain.from_iterable(phase.peaks.values() for phase in self.phases), default=None)

    @property
    def launched(self) -> int:
        """The ranks that the test launched with the fixture ``launch``: the most at once."""
        return max((phase.launched for phase in self.phases), default=0)

    @property
    def rank_count(self) -> int | None:
        """The ranks that the test launched, or in which it ran; None if it has neither."""
        return self.launched or (None if self.world is None else len(self.world.ranks))

    @property
    def span(self) -> Period:
        """The period in which the test ran: in its ranks if it has any."""
        ranks = [rank for phase in self.phases for rank in phase.ranks if rank.start]
        parts = ranks or self.phases
        start = min((one.start for one in parts), default=self.started)
        return Period(start, self.until or max((one.stop for one in parts), default=start))

    @property
    def waited(self) -> float:
        """Seconds that the test waited for devices or CPU slots; the start of new ranks is not part of it."""
        if self.wait is None:
            return 0.0
        return (self.wait.leased or self.wait.ended or self.until or self.started) - self.wait.requested

    @property
    def device_seconds(self) -> float:
        """Seconds that the test ran, times the number of its devices."""
        return self.span.seconds * sum(share for lane, share in self.lanes if lane.session is None)


@dataclass(slots=True)
class Session:
    """One recorded session."""

    started: SessionStarted
    host: str
    """The name of the controller's machine."""
    span: Period
    """From its first event to its last."""
    finished: SessionFinished | None = None
    """None if the session was killed."""
    machines: dict[int, str] = field(default_factory=dict)
    """The names of its machines by number."""
    devices: dict[Lane, DeviceFound] = field(default_factory=dict)
    worlds: list[WorldLife] = field(default_factory=list)
    tests: list[TestRun] = field(default_factory=list)
    """The runs of its tests in the order in which they began."""


@dataclass(frozen=True, slots=True)
class Step:
    """A part of the chain of events that has bounded the time from the first event to the last."""

    kind: StepKind
    span: Period
    test: str = ""
    """The test; empty for `other`."""


def sessions_of(records: Iterable[Sequence[Recorded]]) -> list[Session]:
    """Return the sessions of several records in the order in which they started."""
    ordered = sorted(records, key=lambda record: record[0].stamp.at)
    return [_session(record, number) for number, record in enumerate(ordered)]


def utilisation(sessions: Sequence[Session]) -> list[tuple[float, float]]:
    """Return how many devices ran a test from each time to the next; the number is a fraction where devices are shared.

    Empty if no test ran on a device.
    """
    changes: dict[float, float] = {}
    for session in sessions:
        for test in session.tests:
            span = test.span
            for lane, share in test.lanes:
                if lane.session is None:
                    changes[span.start] = changes.get(span.start, 0.0) + share
                    changes[span.stop] = changes.get(span.stop, 0.0) - share
    used, steps = 0.0, []
    for at in sorted(changes):
        used += changes[at]
        steps.append((at, round(max(used, 0.0), 6)))
    return steps


def seconds_with_tests(tests: Iterable[TestRun]) -> float:
    """Return the seconds in which at least one of `tests` ran."""
    seconds = end = 0.0
    for span in sorted(test.span for test in tests):
        seconds += max(0.0, span.stop - max(span.start, end))
        end = max(end, span.stop)
    return seconds


def lane_rows(sessions: Sequence[Session]) -> list[tuple[Lane, list[list[TestRun]]]]:
    """Return the tests on each device and CPU slot of `sessions`, those without a test too, in rows.

    Lanes are in the order of their hosts; of one host, devices in the order of their indices come before CPU slots. In
    a row, no test begins before the one before it has ended: a lane has several rows if tests shared it.
    """
    indices = {lane: device.index for session in sessions for lane, device in session.devices.items()}
    tests: dict[Lane, list[TestRun]] = {lane: [] for lane in indices}
    for session in sessions:
        for test in session.tests:
            for lane, _ in test.lanes:
                tests.setdefault(lane, []).append(test)

    def order(lane: Lane) -> tuple[str, bool, int, str, int, str]:
        index = int(lane.name) if lane.kind == "slot" else indices.get(lane, len(indices))
        return lane.host, lane.kind == "slot", lane.session or 0, lane.kind, index, lane.name

    return [(lane, _rows(tests[lane])) for lane in sorted(tests, key=order)]


def _rows(tests: Sequence[TestRun]) -> list[list[TestRun]]:
    rows: list[list[TestRun]] = [[]]
    for start, _, test in sorted(((*test.span, test) for test in tests), key=itemgetter(0)):
        row = next((row for row in rows if not row or row[-1].span.stop <= start), None)
        if row is None:
            rows.append(row := [])
        row.append(test)
    return rows


def critical_path(session: Session) -> list[Step]:
    """Return what bounded the duration of `session`, from its start to its end, without gaps.

    Beginning with the test that ended last, each test follows the one that it had to wait for: the last that ended
    before it on one of its devices, its CPU slots or in its process.
    """
    steps: list[Step] = []
    end = session.span.stop
    used = _Used([test for test in session.tests if test.phases])
    test, span = used.last()
    while test is not None:
        span = Period(span.start, min(span.stop, end))
        _add(steps, Step("other", Period(span.stop, end)))
        _add(steps, Step("test", span, test.test))
        end = span.start
        before, span = used.last(test, end)
        # The waits of the test before it ran are counted from the end of the previous test.
        began = session.span.start if before is None else span.stop
        if test.wait is not None:
            leased = test.wait.leased or end
            parts: tuple[tuple[StepKind, float], ...] = (
                ("other", max(leased, test.started)),
                ("ranks", leased),
                ("wait", test.wait.requested),
            )
            for kind, start in parts:
                start = min(max(start, began), end)
                _add(steps, Step(kind, Period(start, end), test.test))
                end = start
        test = before
    _add(steps, Step("other", Period(session.span.start, end)))
    return steps[::-1]


def _add(steps: list[Step], step: Step) -> None:
    if step.span.seconds > 0:
        steps.append(step if step.kind != "other" else Step("other", step.span))


class _Used:
    """Knows which tests have used each device, CPU slot and process. Two tests that use the same cannot run at once."""

    def __init__(self, tests: Sequence[TestRun]) -> None:
        spans = sorted(((test.span, test) for test in tests), key=lambda pair: pair[0].stop)
        self._tests = [(test, span) for span, test in spans]
        """In the order in which they ended."""
        self._positions = {id(test): position for position, (test, _) in enumerate(self._tests)}
        self._users: dict[Lane | int, list[int]] = {}
        """The positions in `_tests` of those that used a lane or the process of this id, in increasing order."""
        for position, (test, _) in enumerate(self._tests):
            for used in _used_by(test):
                self._users.setdefault(used, []).append(position)

    def last(self, test: TestRun | None = None, until: float = 0.0) -> tuple[TestRun | None, Period]:
        """Return the test that ended last, of those that ended by `until` and held `test` up; without `test`, of all.

        Return None if there is none.
        """
        if test is None:
            last = len(self._tests) - 1
        else:
            # Of tests that take no time, none is before itself or a later one.
            end = min(bisect_right(self._tests, until, key=lambda pair: pair[1].stop), self._positions[id(test)])
            found = (self._users[used] for used in _used_by(test))
            last = max((users[before - 1] for users in found if (before := bisect_left(users, end))), default=-1)
        return (None, Period(0.0, 0.0)) if last < 0 else self._tests[last]


def _used_by(test: TestRun) -> set[Lane | int]:
    return {lane for lane, _ in test.lanes} | {phase.process for phase in test.phases}


class _Slots:
    """Gives each world without devices free CPU slots of its session: the ones with the lowest numbers."""

    def __init__(self, session: int, host: str) -> None:
        self._session = session
        self._host = host
        self._taken: list[Period] = []
        """The last period in which each slot was used."""

    def take(self, count: int, span: Period) -> list[Lane]:
        free = [number for number, taken in enumerate(self._taken) if taken.stop <= span.start][:count]
        while len(free) < count:
            free.append(len(self._taken))
            self._taken.append(span)
        for number in free:
            self._taken[number] = span
        return [Lane(self._host, "slot", str(number), self._session) for number in free]


def _session(record: Sequence[Recorded], position: int) -> Session:
    first = record[0]
    assert isinstance(first.event, SessionStarted)  # The reader has checked it.
    span = Period(first.stamp.at, max(one.stamp.at for one in record))
    session = Session(first.event, first.stamp.host, span)
    worlds: dict[int, WorldLife] = {}
    waits: dict[int, Wait] = {}
    latest_wait: dict[str, Wait] = {}
    running: dict[tuple[str, str], TestRun] = {}
    begun: dict[str, list[float]] = {}
    for recorded in record:
        at, event = recorded.stamp.at, recorded.event
        match event:
            case MachineFound():
                session.machines[event.machine] = event.name
            case DeviceFound():
                session.devices[_device(session, event.machine, event.device, event.kind)] = event
            case WorldRequested():
                waits[event.request] = latest_wait[event.test] = Wait(at)
            case RequestWaits() if event.request in waits:
                waits[event.request].why = event.why
            case RequestEnded() if event.request in waits:
                waits[event.request].failed, waits[event.request].ended = event.why, at
            case WorldStarting():
                worlds[event.world] = WorldLife(event.world, event.about, event.ranks, at)
                if event.request in waits:
                    waits[event.request].leased = at
            case WorldReady() if event.world in worlds:
                worlds[event.world].ready, worlds[event.world].pids = at, event.pids
            case WorldAcquired() if event.world in worlds and event.request in waits:
                wait = waits[event.request]
                wait.acquired, wait.leased = at, wait.leased or at
                wait.world = worlds[event.world]
            case WorldEnding() if event.world in worlds and not worlds[event.world].why_ended:
                worlds[event.world].why_ended, worlds[event.world].killed = event.why, event.killed
            case WorldGone() if event.world in worlds:
                worlds[event.world].gone = at
            case TestStarted():
                begun.setdefault(event.test, []).append(at)
            case PhaseReported():
                key = event.worker, event.test
                if not event.worker:  # xdist's report of a crash does not name the worker.
                    key = next((one for one in running if one[1] == event.test), key)
                run = running.get(key)
                if run is None or event.when == "setup":
                    times = begun.get(event.test, [])
                    run = TestRun(event.test, times.pop(0) if times else event.start or at)
                    run.wait = latest_wait.pop(event.test, None)
                    session.tests.append(run)
                    running[key] = run
                if not event.start:  # The report of a crash has no times.
                    since = run.phases[-1].stop if run.phases else run.started
                    event = msgspec.structs.replace(event, start=since, stop=at)
                    run.until = at
                run.phases.append(event)
                run.world = worlds.get(event.world, run.world)
                if event.when not in ("setup", "call"):
                    del running[key]
            case SessionFinished():
                session.finished = event
    session.worlds = list(worlds.values())
    # Tests that were running when the record ended.
    for run in running.values():
        if run.verdict == "unfinished":
            run.until = span.stop
    for test, times in begun.items():
        session.tests += [_unfinished(test, at, latest_wait.get(test), span.stop) for at in times]
    session.tests.sort(key=lambda run: run.span.start)
    _place(session, position)
    return session


def _unfinished(test: str, started: float, wait: Wait | None, until: float) -> TestRun:
    return TestRun(test, started, wait=wait, world=None if wait is None else wait.world, until=until)


def _place(session: Session, position: int) -> None:
    """Determine the devices or CPU slots of each test."""
    slots: dict[str, _Slots] = {}
    for test in session.tests:
        if test.world is None:
            continue
        shares: dict[Lane, float] = {}
        ranks_on: dict[str, int] = {}
        for place in test.world.ranks:
            host = session.machines.get(place.machine, session.host)
            if not place.devices:
                ranks_on[host] = ranks_on.get(host, 0) + 1
            for device in place.devices:
                lane = _device(session, place.machine, device)
                shares[lane] = min(1.0, shares.get(lane, 0.0) + place.share)
        for host, count in ranks_on.items():
            for lane in slots.setdefault(host, _Slots(position, host)).take(count, test.span):
                shares[lane] = 1.0
        test.lanes = tuple(shares.items())


def _device(session: Session, machine: int, device: str, kind: str = "") -> Lane:
    """Return the lane of a device of a machine. Its `kind`, if not given, is that with which the device was found."""
    host = session.machines.get(machine, session.host)
    known = (lane for lane in session.devices if (lane.host, lane.name) == (host, device))
    return next(known, Lane(host, kind or "device", device))
