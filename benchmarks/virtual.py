"""Simulation of a session with a scheduler of xdist's kind: workers and devices under a virtual clock.

A worker behaves like ``xdist/remote.py``: it starts a test when it has the next one, or knows that there is none. The
policy that grants devices is the real one.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from pytest_accel.features.order.tasks import Need
from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Lease, Request, decide


class Span(NamedTuple):
    """The simulated run of a test."""

    test: int
    """Index of the test."""
    worker: int
    begin: float
    """Seconds since the start of the session."""
    end: float


@dataclass(frozen=True, slots=True)
class SimulatedTest:
    """A test, with the resources that it takes and its duration."""

    nodeid: str
    seconds: float
    requests: tuple[Request, ...] = ()
    """Requests of different kinds, which are granted together; empty: the test needs only a worker."""


@dataclass(slots=True, eq=False)
class Worker:
    """A simulated xdist worker, with the interface of xdist's `WorkerController`."""

    machine: SimulatedMachine
    number: int
    queue: deque[int] = field(default_factory=deque)
    current: int | None = None
    """Index of the test that it runs."""
    following: int | None = None
    """Index of the test that it runs next."""
    ended: bool = False
    shutting_down: bool = False

    @property
    def gateway(self) -> SimpleNamespace:
        return SimpleNamespace(id=f"gw{self.number}")

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self.queue.extend(indices)
        self.machine.wake(self)

    def send_steal(self, indices: Sequence[int]) -> None:
        stolen = list(indices) if set(indices) <= set(self.queue) else []
        self.queue = deque(index for index in self.queue if index not in stolen)
        self.machine.call_later(0.0, lambda: self.machine.scheduler.remove_pending_tests_from_node(self, stolen))

    def shutdown(self) -> None:
        self.shutting_down = True
        self.machine.wake(self)

    def advance(self) -> None:
        """Start the next test, if the one after it is known or the worker is shutting down."""
        while self.current is None and not self.ended:
            if self.following is None and self.queue:
                self.following = self.queue.popleft()
            if self.following is None or not (self.queue or self.shutting_down):
                self.ended = self.shutting_down and self.following is None
                return
            index, self.following = self.following, self.queue.popleft() if self.queue else None
            self.current = index
            if index < 0:  # A hint of the scheduler of this plugin, which the worker passes over.
                self.machine.call_later(0.0, lambda: self.done(0.0))
            else:
                self.machine.run(self, index)

    def done(self, seconds: float) -> None:
        """Report to the scheduler that the current test has ended after `seconds`."""
        index, self.current = self.current, None
        assert index is not None
        start = time.process_time()
        self.machine.scheduler.mark_test_complete(self, index, seconds)
        self.machine.scheduler_seconds.append(time.process_time() - start)
        self.machine.wake(self)


class SimulatedMachine:
    """The simulated machine: devices, workers and the virtual clock `now`, in seconds."""

    def __init__(self, jobs: Sequence[SimulatedTest], devices: Mapping[str, int], workers: int, slots: int = 0) -> None:
        """`devices` maps each device to its free parts; `slots` is the number of CPU slots."""
        self.jobs = jobs
        self.devices = tuple(devices)
        self.workers = [Worker(self, number) for number in range(workers)]
        self.collection = [job.nodeid for job in jobs]
        self.scheduler: Any = None
        self.now = 0.0
        self.spans: list[Span] = []
        """The tests that have ended, in the order in which they ended."""
        self.scheduler_seconds: list[float] = []
        """CPU seconds that the scheduler used at the end of each test."""
        self._free = dict(devices)
        self._free_slots = slots
        self._waiting: list[tuple[Worker, int]] = []
        """The tests that wait, by worker and index, in the order of their requests."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._last_number = 0
        """The last number given to an event."""
        self._awake: deque[Worker] = deque()

    def call_later(self, delay: float, call: Callable[[], None]) -> None:
        self._last_number += 1
        heapq.heappush(self._events, (self.now + delay, self._last_number, call))

    def wake(self, worker: Worker) -> None:
        self._awake.append(worker)

    def run(self, worker: Worker, index: int) -> None:
        """Run a test: wait for its devices or slots, then for its duration."""
        if self.jobs[index].requests:
            self._waiting.append((worker, index))
            self._grant()
        else:
            self._begin(worker, index, (), 0)

    def simulate(self, scheduler: Any) -> float:
        """Simulate the whole session and return its seconds. Raises AssertionError unless each test has run once."""
        self.scheduler = scheduler
        for worker in self.workers:
            scheduler.add_node(worker)
        for worker in self.workers:
            scheduler.add_node_collection(worker, self.collection)
        scheduler.schedule()
        self._advance_workers()
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()
            self._advance_workers()
            if scheduler.tests_finished:
                for worker in self.workers:
                    worker.shutdown()
                self._advance_workers()
        assert sorted(span.test for span in self.spans) == list(range(len(self.jobs)))
        return self.now

    def _advance_workers(self) -> None:
        while self._awake:
            self._awake.popleft().advance()

    def _grant(self) -> None:
        requests = [replace(one, id=index) for _, index in self._waiting for one in self.jobs[index].requests]
        granted: dict[int, list[Lease]] = {}
        for lease in decide(requests, self._free, self._free_slots):
            granted.setdefault(lease.id, []).append(lease)
        for worker, index in list(self._waiting):
            leases = granted.get(index, [])
            if len(leases) < len(self.jobs[index].requests):
                continue
            self._waiting.remove((worker, index))
            taken = tuple(pair for lease in leases for pair in lease.takes())
            for device, parts in taken:
                self._free[device] -= parts
                assert self._free[device] >= 0
            slots = sum(lease.slots for lease in leases)
            self._free_slots -= slots
            self._begin(worker, index, taken, slots)

    def _begin(self, worker: Worker, index: int, taken: tuple[tuple[str, int], ...], slots: int) -> None:
        start = self.now

        def end() -> None:
            self.spans.append(Span(index, worker.number, start, self.now))
            for device, parts in taken:
                self._free[device] += parts
            self._free_slots += slots
            self._grant()
            worker.done(self.now - start)

        self.call_later(self.jobs[index].seconds, end)


@dataclass(frozen=True, slots=True)
class Test:
    """A test of a mix."""

    __test__ = False

    seconds: float
    devices: int = 0
    share: float = 1.0
    """The part of each of its devices that the test uses."""
    module: int = 0

    @property
    def size(self) -> float:
        """The number of devices, where a part of a device counts as a fraction."""
        return self.devices * self.share

    def requests(self, devices: Sequence[str]) -> tuple[Request, ...]:
        """Return the test's request to the pool; none if it needs no device."""
        if not self.devices:
            return ()
        parts = () if self.share == 1 else (int(self.share * WHOLE),) * len(devices)
        return (Request(0, tuple(devices), self.devices, parts=parts),)

    def need(self, devices: Sequence[str]) -> Need:
        """Return the need of the test in the plugin's order."""
        return (("sim", self.devices, self.size / len(devices)),) if self.devices else ()


class UniformMachine(SimulatedMachine):
    """Workers and equal devices."""

    def __init__(self, tests: Sequence[Test], devices: int, workers: int) -> None:
        self.tests = tests
        names = [f"sim-{number}" for number in range(devices)]
        jobs = [
            SimulatedTest(f"test_{test.module}.py::test_{number}", test.seconds, test.requests(names))
            for number, test in enumerate(tests)
        ]
        super().__init__(jobs, dict.fromkeys(names, WHOLE), workers)
