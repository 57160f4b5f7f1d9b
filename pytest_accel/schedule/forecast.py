"""How a suite would be packed on a machine, by the real scheduler under a virtual clock. No test is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.shares import WHOLE
from pytest_accel.schedule import simulation
from pytest_accel.schedule.backlog import GUESS
from pytest_accel.schedule.history import Durations, expected
from pytest_accel.schedule.lower_bounds import least
from pytest_accel.schedule.scheduler import DeviceScheduling
from pytest_accel.schedule.simulation import Job, Span
from pytest_accel.schedule.test_demand import Demand

CLOSE = 0.02
"""Numbers of workers whose sessions take no more than this part longer than the shortest are equally good."""


@dataclass(frozen=True, slots=True)
class Times:
    """What each test is taken to take."""

    expected: tuple[float | None, ...]
    """Seconds remembered of the kind of device that the test is to run on: what the scheduler would know."""
    seconds: tuple[float, ...]
    """The same, and a guess where nothing is remembered."""
    elsewhere: int
    """How many are remembered of another kind of device only, and counted as there."""
    unknown: int
    """How many were never timed."""
    guess: float
    """Seconds for each of those."""


def times(durations: Durations, tests: Sequence[tuple[str, str]]) -> Times:
    """For `tests`, each a node id and a kind of device. One that was never timed counts as the median of the others."""
    here = [expected(durations.get(nodeid, {}).get(kind, ())) for nodeid, kind in tests]
    there = [_anywhere(durations.get(nodeid, {})) for nodeid, _ in tests]
    known = [other if one is None else one for one, other in zip(here, there, strict=True)]
    timed = [one for one in known if one is not None]
    guess = median(timed) if timed else GUESS
    return Times(
        tuple(here),
        tuple(guess if one is None else one for one in known),
        len(timed) - sum(one is not None for one in here),
        len(tests) - len(timed),
        guess,
    )


def _anywhere(by_kind: Mapping[str, Sequence[float]]) -> float | None:
    """The longest that a test is expected to take on any kind of device."""
    found = [seconds for values in by_kind.values() if (seconds := expected(values)) is not None]
    return max(found, default=None)


@dataclass(frozen=True, slots=True)
class Play:
    """A session with so many workers."""

    workers: int
    spans: tuple[Span, ...]
    """In the order in which the tests end."""

    @property
    def makespan(self) -> float:
        """Seconds from the first test's begin to the last one's end."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def device_seconds(self) -> float:
        """Seconds for which tests hold devices, parts counted as such."""
        return sum(parts * (span.end - span.begin) for span in self.spans for _, parts in span.devices) / WHOLE

    def utilisation(self, devices: int) -> float:
        """The part of the time of `devices` for which tests hold them."""
        return self.device_seconds / (devices * self.makespan) if self.makespan else 0.0


class Suite:
    """Tests that can run on a machine, and the machine."""

    def __init__(self, collection: Sequence[str], demand: Demand, times: Times, machine: Machine, slots: int) -> None:
        """`collection` are the node ids of the tests; `slots` are those of the CPU."""
        self.collection = list(collection)
        self._demand = demand
        self.times = times
        self._machine = machine
        self._slots = slots
        self._requests = demand.requests(len(collection), machine, slots)
        self._free = demand.devices(machine)
        self.devices = len({device.id for device in machine.session.devices} | self._free.keys())
        """How many devices the session has, those that no test uses included."""

    def takes(self, index: int) -> str:
        """What a test takes, in two words; nothing for one that only needs a worker."""
        request = self._requests[index]
        if request is None:
            return ""
        count, word = (request.count, "device") if request.count else (request.slots, "CPU slot")
        return f"{count} {word}{'' if count == 1 else 's'}"

    @cached_property
    def least(self) -> float:
        """Seconds that no order and no number of workers can beat."""
        return least(list(zip(self._requests, self.times.seconds, strict=True)), self._slots)

    def play(self, workers: int) -> Play:
        """The session under ``-n workers``."""
        tests = zip(self.collection, self.times.seconds, self._requests, strict=True)
        jobs = [Job(nodeid, seconds, request) for nodeid, seconds, request in tests]
        clock = simulation.Machine(jobs, self._free, workers, self._slots)
        backlog = self._demand.backlog(self.collection, self._machine, self._slots, self.times.expected)
        scheduler = DeviceScheduling(self.collection, backlog, self._free, self._slots, clock, clock=lambda: clock.now)
        clock.play(scheduler)
        return Play(workers, tuple(clock.spans))

    def plays(self) -> Iterator[Play]:
        """Under 1, 2, 4, ... workers, up to the first number that does not help."""
        workers, last = 1, float("inf")
        while True:
            play = self.play(workers)
            yield play
            if play.makespan > last * (1 - CLOSE) or workers >= len(self.collection):
                return
            workers, last = 2 * workers, play.makespan


def best(plays: Sequence[Play]) -> Play:
    """The one with the fewest workers of those that are about as short as the shortest."""
    shortest = min(play.makespan for play in plays)
    return min((play for play in plays if play.makespan <= shortest * (1 + CLOSE)), key=lambda play: play.workers)


def chain(spans: Sequence[Span]) -> list[Span]:
    """What the session's length is made of: the last test to end, and before each test the one that it waited for.

    `spans` are in the order in which the tests end. Of several that end when a test begins, it is one whose device the
    test gets, else one that had its worker, else the last of them.
    """
    ending: dict[float, list[int]] = {}
    for number, span in enumerate(spans):
        ending.setdefault(span.end, []).append(number)
    found: list[Span] = []
    at: int | None = len(spans) - 1 if spans else None
    while at is not None:
        now = spans[at]
        found.append(now)
        names = {device for device, _ in now.devices}
        before = [number for number in ending.get(now.begin, ()) if number < at]
        at = max(
            before,
            key=lambda number: (_has_one_of(spans[number], names), spans[number].worker == now.worker, number),
            default=None,
        )
    return found[::-1]


def _has_one_of(span: Span, names: set[str]) -> bool:
    return any(device in names for device, _ in span.devices)
