"""The present state of a session, made from its events: running tests, waiting requests, and devices in use."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from threading import Lock

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.core.record_events import (
    DeviceFound,
    Event,
    PhaseReported,
    RequestEnded,
    TestStarted,
    WorldAcquired,
    WorldGone,
    WorldRequested,
    WorldReturned,
    WorldStarting,
)

_MOST_NEW = 1_000
"""Maximum number of events that are collected before they are applied."""


@dataclass(slots=True)
class RunningTest:
    """A test that has started and not ended."""

    test: str
    """Node id."""
    worker: str
    """Name of xdist's worker; empty without xdist."""
    since: float
    phase: str = "setup"
    world: int = 0
    """The world in which it runs; 0 for a test without marks, and if the world has been returned."""


@dataclass(slots=True)
class OpenRequest:
    """A request for a world that has not been answered."""

    number: int
    test: str
    since: float


@dataclass(slots=True)
class _World:
    devices: frozenset[tuple[int, str]]
    """The machine and id of each device."""
    in_use: bool = True
    test: str = ""
    """The test that has requested the world; empty from the start of the test."""
    worker: str | None = None
    """The worker that uses the world; None if unknown."""


@dataclass(slots=True)
class LiveState:
    """The present state of a session. Times are those that are given with the events."""

    running: dict[str, RunningTest] = field(default_factory=dict)
    """By worker: each runs one test at a time."""
    requests: dict[int, OpenRequest] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    """Number of tests with each node id that have ended."""
    _devices: set[tuple[int, str]] = field(default_factory=set)
    _worlds: dict[int, _World] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """The number of devices that the session can use."""
        return len(self._devices)

    @property
    def devices_in_use(self) -> int:
        """The number of devices on which a test runs or is about to run."""
        used = [world.devices for world in self._worlds.values() if world.in_use]
        return len(frozenset[tuple[int, str]]().union(*used))

    def copy(self) -> LiveState:
        """Return a copy, which shares only the numbers of ended tests."""
        return replace(
            self,
            running={worker: replace(test) for worker, test in self.running.items()},
            requests={number: replace(request) for number, request in self.requests.items()},
            _devices=self._devices.copy(),
            _worlds={number: replace(world) for number, world in self._worlds.items()},
        )

    def apply(self, event: Event, at: float) -> None:
        """Update the state by an event that has happened at the time `at`."""
        match event:
            case DeviceFound():
                self._devices.add((event.machine, event.device))
            case WorldRequested():
                self.requests[event.request] = OpenRequest(event.request, event.test, at)
            case RequestEnded():
                self.requests.pop(event.request, None)
            case WorldStarting():
                places = frozenset((place.machine, device) for place in event.ranks for device in place.devices)
                self._worlds[event.world] = _World(places)
            case WorldAcquired() if event.world in self._worlds:
                self._acquire(event.world, self.requests.pop(event.request, None))
            case WorldReturned() if event.world in self._worlds:
                self._worlds[event.world].in_use = False
                for one in self.running.values():
                    one.world = 0 if one.world == event.world else one.world
            case WorldGone():
                self._worlds.pop(event.world, None)
            case TestStarted():
                test = RunningTest(event.test, event.worker, at)
                self.running[event.worker] = test
                self._find_world(test)
            case PhaseReported():
                self._end_phase(event)

    def _acquire(self, number: int, request: OpenRequest | None) -> None:
        world = self._worlds[number]
        world.in_use, world.worker, world.test = True, None, "" if request is None else request.test
        for one in self.running.values():
            if one.test == world.test and not one.world:  # The test runs again, in another world.
                self._find_world(one)

    def _find_world(self, test: RunningTest) -> None:
        """Determine the world of a test: the one that it has requested, or the one of the test before it."""
        for number, world in self._worlds.items():
            if world.in_use and (world.test == test.test or (not world.test and world.worker == test.worker)):
                test.world, world.worker, world.test = number, test.worker, ""
                return

    def _end_phase(self, event: PhaseReported) -> None:
        found = (one for one in self.running.values() if one.test == event.test)
        # The report of a crash does not name the worker.
        test = next((one for one in found if event.worker in ("", one.worker)), None)
        if test is not None:
            test.phase = "call" if event.when == "setup" and event.outcome == "passed" else "teardown"
        if event.when not in ("setup", "call"):
            self.ended[event.test] += 1
            if test is not None:
                del self.running[test.worker]


class LiveEvents:
    """Receives the events of a session, in any thread, and keeps its state.

    The state is seldom asked for, and each test has four events or more. So they are only collected, and applied later.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._state = LiveState()
        self._new: deque[tuple[Event, float]] = deque()
        """The events that are not part of the state yet, with their times."""

    def __call__(self, event: Event) -> None:
        self._new.append((event, monotonic()))
        if len(self._new) > _MOST_NEW:
            with self._lock:
                self._apply_new()

    def state(self) -> LiveState:
        """Return the present state, which does not change any more; its times are those of `clock.monotonic`."""
        with self._lock:
            self._apply_new()
            return self._state.copy()

    def _apply_new(self) -> None:
        while self._new:
            self._state.apply(*self._new.popleft())


LIVE_EVENTS: pytest.StashKey[LiveEvents] = pytest.StashKey()
"""The receiver of a session's events, on the controller's config."""
