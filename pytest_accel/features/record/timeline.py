"""The runs of tests, the worlds, and the use of devices, in one or several recorded sessions.

Pure functions of the events. Times are seconds since the epoch, of the clock of the machine that reported them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec.structs import replace

from pytest_accel.features.record.record_file import Event

Verdict = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed", "rerun", "unfinished"]
"""The verdict on one run of a test: pytest's, ``rerun`` if another run follows, or ``unfinished`` without an end."""


class Period(NamedTuple):
    """A period of time."""

    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


class Lane(NamedTuple):
    """A device. Sessions on one machine share devices."""

    host: str
    kind: str
    name: str
    """The id of the device."""


@dataclass(slots=True)
class TestRun:
    """A run of a test. A test that a plugin runs again has several runs."""

    __test__ = False  # pytest would collect the class.

    test: str
    started: float
    worker: str
    """The name of xdist's worker; empty without xdist."""
    phases: list[Event] = field(default_factory=list)
    wait: Sequence[Event] = ()
    """The events of its request for a world; empty if it used the world of the test before it, or needs none."""
    world: Event | None = None
    """The start of the ranks in which it ran."""
    lanes: dict[Lane, float] = field(default_factory=dict)
    """The devices that the test ran on, and its share of each."""
    until: float | None = None
    """Time at which its process crashed or the record ended, for a test that was running then; else None."""

    @property
    def verdict(self) -> Verdict:
        if failed := {phase.when for phase in self.phases if phase.outcome == "failed"}:
            return "error" if failed <= {"setup", "teardown"} else "failed"
        if any(phase.outcome not in ("passed", "skipped") for phase in self.phases):
            return "rerun"
        for phase in self.phases:
            if phase.outcome == "skipped":
                return "skipped" if phase.xfail is None else "xfailed"
        call = next((phase for phase in self.phases if phase.when == "call"), None)
        if call is None:
            return "unfinished"
        return "passed" if call.xfail is None else "xpassed"

    @property
    def failure(self) -> Event | None:
        """The first phase that failed; None if none did."""
        return next((phase for phase in self.phases if phase.headline or phase.failure), None)

    @property
    def skip(self) -> str:
        """The reason of a skip; empty for a test that ran."""
        return next((phase.skip for phase in self.phases if phase.skip is not None), "")

    @property
    def missing(self) -> str:
        """The missing hardware that is the reason of a skip or failure; empty if it is none."""
        return next((phase.missing for phase in self.phases if phase.missing is not None), "")

    @property
    def peaks(self) -> dict[str, int]:
        """The peak of device memory in bytes by rank; empty if it was not measured."""
        return {rank: peak for phase in self.phases for rank, peak in phase.peaks.items()}

    @property
    def span(self) -> Period:
        """The period in which the test ran: in its ranks if it has any."""
        parts = [rank for phase in self.phases for rank in phase.ranks if rank.start] or self.phases
        start = min((one.start for one in parts), default=self.started)
        return Period(start, self.until or max((one.stop for one in parts), default=start))

    @property
    def waited(self) -> float:
        """Seconds that the test waited for devices or CPU slots; the start of new ranks is not part of it."""
        if not self.wait:
            return 0.0
        ended = (one.at for one in self.wait if one.event in ("WorldStarting", "WorldAcquired", "RequestEnded"))
        return next(ended, self.until or self.started) - self.wait[0].at

    @property
    def why_waited(self) -> str:
        """The reason of the wait, with the holders of the devices if they are known; empty if there was none."""
        return next((one.why for one in self.wait if one.event == "RequestWaits"), "")

    @property
    def device_seconds(self) -> float:
        """Seconds that the test ran, times the number of its devices; a part of a device counts as a fraction."""
        return self.span.seconds * sum(self.lanes.values())


@dataclass(slots=True)
class Session:
    """A recorded session."""

    started: Event
    span: Period
    """From its first event to its last."""
    finished: Event | None = None
    """The last event; None if the session was killed."""
    collected: Event | None = None
    devices: dict[Lane, Event] = field(default_factory=dict)
    worlds: dict[int, Event] = field(default_factory=dict)
    """The start of each world."""
    ready: dict[int, Event] = field(default_factory=dict)
    """Each world whose ranks have started."""
    tests: list[TestRun] = field(default_factory=list)
    """The runs of its tests in the order in which they began."""

    @property
    def host(self) -> str:
        """The name of the controller's machine."""
        return self.started.host

    def device(self, machine: str, device: str, kind: str | None = None) -> Lane:
        """Return the lane of a device. Its `kind`, if not given, is that with which it was found."""
        host = machine or self.host
        known = (lane for lane in self.devices if (lane.host, lane.name) == (host, device))
        return next(known, Lane(host, kind or "device", device))


def sessions_of(records: Iterable[Sequence[Event]]) -> list[Session]:
    """Return the sessions of several records in the order in which they started."""
    return [_session(record) for record in sorted(records, key=lambda record: record[0].at)]


def covered(periods: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that are in at least one of `periods`."""
    seconds = end = 0.0
    for start, stop in sorted(periods):
        seconds += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return seconds


def _session(record: Sequence[Event]) -> Session:
    session = Session(record[0], Period(record[0].at, max(event.at for event in record)))
    requests: dict[int, list[Event]] = {}
    latest_request: dict[str, list[Event]] = {}
    running: dict[tuple[str, str], TestRun] = {}
    for event in record:
        world = session.worlds.get(event.world)
        match event.event:
            case "DeviceFound":
                session.devices[session.device(event.machine, event.device, event.kind)] = event
            case "WorldRequested":
                latest_request[event.test] = requests[event.request] = [event]
            case "RequestWaits" | "RequestEnded" | "WorldAcquired":
                requests.setdefault(event.request, []).append(event)
            case "WorldStarting":
                requests.setdefault(event.request, []).append(event)
                session.worlds[event.world] = event
            case "WorldReady":
                session.ready[event.world] = event
            case "TestStarted":
                running[event.worker, event.test] = run = TestRun(event.test, event.at, event.worker)
                session.tests.append(run)
            case "PhaseReported":
                key = event.worker, event.test
                if not event.worker:  # xdist's report of a crash does not name the worker.
                    key = next((one for one in running if one[1] == event.test), key)
                if key not in running or (event.when == "setup" and running[key].phases):  # A plugin runs it again.
                    running[key] = TestRun(event.test, event.start or event.at, event.worker)
                    session.tests.append(running[key])
                run = running[key]
                _add_phase(run, event)
                run.world = world or run.world
                run.wait = run.wait or latest_request.pop(event.test, ())
                if event.when not in ("setup", "call"):
                    del running[key]
            case "TestsCollected":
                session.collected = event
            case "SessionFinished":
                session.finished = event
    for run in running.values():  # Tests that were running when the record ended.
        run.wait = run.wait or latest_request.get(run.test, ())
        acquired = (session.worlds.get(one.world) for one in run.wait if one.event == "WorldAcquired")
        run.world = run.world or next(acquired, None)
        run.until = session.span.stop if run.verdict == "unfinished" else None
    session.tests.sort(key=lambda run: run.span.start)
    for run in session.tests:
        for place in () if run.world is None else run.world.places:
            for device in place.devices:
                lane = session.device(place.machine, device)
                run.lanes[lane] = min(1.0, run.lanes.get(lane, 0.0) + place.share)
    return session


def _add_phase(run: TestRun, event: Event) -> None:
    before = run.phases[-1] if run.phases else None
    if not event.start:  # The report of a crash has no times.
        run.until = event.at
        event = replace(event, start=run.started if before is None else before.stop, stop=event.at)
    if before is not None and before.when == event.when and before.outcome == "failed":
        # Subtests have failed, which pytest reports before the phase, and maybe as passed. Show the first of them.
        run.phases.pop()
        shown = {name: getattr(before, name) for name in ("outcome", "headline", "failure", "place", "output")}
        event = replace(event, **shown)
    run.phases.append(event)
