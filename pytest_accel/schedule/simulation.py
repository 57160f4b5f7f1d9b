"""Workers of xdist and a pool of devices under a virtual clock: what a session's order of tests comes to, in seconds.

The schedulers are the real ones, and so is the policy by which the devices are given out. A worker does what
``xdist/remote.py`` does: it begins a test when it has the one after it, or knows that there is none.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request, decide


@dataclass(frozen=True, slots=True)
class Job:
    """A test: what it takes, and for how long."""

    nodeid: str
    seconds: float
    request: Request | None = None
    """None: nothing but a worker."""


@dataclass(frozen=True, slots=True)
class Span:
    """What has become of a test."""

    index: int
    """Its number among the jobs."""
    worker: int
    begin: float
    end: float
    """Both in seconds since the session's begin."""
    devices: tuple[tuple[str, int], ...] = ()
    """What it held: devices and the parts of them."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker as its controller sees it, and what it does."""

    machine: Machine
    number: int
    queue: deque[int] = field(default_factory=deque)
    current: int | None = None
    following: int | None = None
    ended: bool = False
    shutting_down: bool = False
    held: set[int] = field(default_factory=set)

    @property
    def gateway(self) -> SimpleNamespace:
        return SimpleNamespace(id=f"gw{self.number}")

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self.queue.extend(indices)
        self.machine.wake(self)

    def send_steal(self, indices: Sequence[int]) -> None:
        stolen = list(indices) if set(indices) <= set(self.queue) else []
        self.queue = deque(index for index in self.queue if index not in stolen)
        self.machine.at(0.0, lambda: self.machine.scheduler.remove_pending_tests_from_node(self, stolen))

    def shutdown(self) -> None:
        self.shutting_down = True
        self.machine.wake(self)

    def advance(self) -> None:
        """Begin the next test, if it is known which one follows."""
        while self.current is None and not self.ended:
            if self.following is None and self.queue:
                self.following = self.queue.popleft()
            if self.following is None or not (self.queue or self.shutting_down):
                self.ended = self.shutting_down and self.following is None
                return
            index, self.following = self.following, self.queue.popleft() if self.queue else None
            self.current = index
            if index in self.held:
                self.machine.at(0.0, lambda: self.done(0.0))
            else:
                self.machine.run(self, index)

    def done(self, seconds: float) -> None:
        """The test has ended."""
        index, self.current = self.current, None
        assert index is not None
        start = time.process_time()
        self.machine.scheduler.mark_test_complete(self, index, seconds)
        self.machine.thought.append(time.process_time() - start)
        self.machine.wake(self)


class Machine:
    """Devices and workers."""

    def __init__(self, jobs: Sequence[Job], devices: Mapping[str, int], workers: int, slots: int = 0) -> None:
        """`devices` with the parts that each has; `slots` are those of the CPU."""
        self.jobs = jobs
        self.devices = tuple(devices)
        self.workers = [Worker(self, number) for number in range(workers)]
        self.collection = [job.nodeid for job in jobs]
        self.scheduler: Any = None
        self.now = 0.0
        self.spans: list[Span] = []
        """Of all tests that have come to their end, in the order of their ends."""
        self.thought: list[float] = []
        """CPU seconds that the scheduler took over each test that came to its end."""
        self._free = dict(devices)
        self._free_slots = slots
        self._waiting: list[tuple[Request, Worker, int]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._awake: deque[Worker] = deque()

    def hold(self, node: Worker, index: int) -> None:
        node.held.add(index)

    def go(self, node: Worker, index: int) -> None:
        node.held.discard(index)

    def at(self, delay: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + delay, self._number, call))

    def wake(self, worker: Worker) -> None:
        self._awake.append(worker)

    def run(self, worker: Worker, index: int) -> None:
        """Get what a test needs, then let its time pass."""
        self._number += 1
        request = self.jobs[index].request
        if request is None:
            self._begin(worker, index, (), 0)
        else:
            self._waiting.append((replace(request, id=self._number), worker, index))
            self._grant()

    def play(self, scheduler: Any) -> float:
        """The whole session; its seconds. AssertionError unless each test has run once."""
        self.scheduler = scheduler
        for worker in self.workers:
            scheduler.add_node(worker)
        for worker in self.workers:
            scheduler.add_node_collection(worker, self.collection)
        scheduler.schedule()
        self._stir()
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()
            self._stir()
            if scheduler.tests_finished:
                for worker in self.workers:
                    worker.shutdown()
                self._stir()
        assert sorted(span.index for span in self.spans) == list(range(len(self.jobs)))
        return self.now

    def _stir(self) -> None:
        while self._awake:
            self._awake.popleft().advance()

    def _grant(self) -> None:
        asked = {request.id: (worker, index) for request, worker, index in self._waiting}
        for grant in decide([request for request, _, _ in self._waiting], self._free, self._free_slots):
            worker, index = asked[grant.request]
            self._waiting = [one for one in self._waiting if one[0].id != grant.request]
            taken = tuple(zip(grant.devices, grant.parts or (WHOLE,) * len(grant.devices), strict=True))
            for device, parts in taken:
                self._free[device] -= parts
                assert self._free[device] >= 0
            self._free_slots -= grant.slots
            self._begin(worker, index, taken, grant.slots)

    def _begin(self, worker: Worker, index: int, taken: tuple[tuple[str, int], ...], slots: int) -> None:
        begun = self.now

        def end() -> None:
            self.spans.append(Span(index, worker.number, begun, self.now, taken))
            for device, parts in taken:
                self._free[device] += parts
            self._free_slots += slots
            self._grant()
            worker.done(self.now - begun)

        self.at(self.jobs[index].seconds, end)
