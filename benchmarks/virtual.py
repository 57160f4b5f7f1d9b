"""Workers of xdist and a pool of devices under a virtual clock: what a session's order of tests comes to, in seconds.

The schedulers are the real ones, and so is the policy by which the devices are given out. A worker does what
``xdist/remote.py`` does: it begins a test when it has the one after it, or knows that there is none.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request, decide


@dataclass(frozen=True, slots=True)
class Test:
    """A test of a mix."""

    __test__ = False

    seconds: float
    devices: int = 0
    share: float = 1.0
    """The part of each of its devices that it takes."""
    module: int = 0

    @property
    def size(self) -> float:
        """Devices, parts counted as such."""
        return self.devices * self.share

    def request(self, devices: Sequence[str], number: int = 0) -> Request | None:
        """What it asks the pool for."""
        if not self.devices:
            return None
        parts = () if self.share == 1 else (int(self.share * WHOLE),) * len(devices)
        return Request(number, tuple(devices), self.devices, parts=parts)


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

    def __init__(self, tests: Sequence[Test], devices: int, workers: int) -> None:
        self.tests = tests
        self.devices = tuple(f"sim-{number}" for number in range(devices))
        self.workers = [Worker(self, number) for number in range(workers)]
        self.collection = [f"test_{test.module}.py::test_{number}" for number, test in enumerate(tests)]
        self.scheduler: Any = None
        self.now = 0.0
        self.ran: list[int] = []
        self.thought: list[float] = []
        """CPU seconds that the scheduler took over each test that came to its end."""
        self._free = dict.fromkeys(self.devices, WHOLE)
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
        request = self.tests[index].request(self.devices, self._number)
        if request is None:
            self._begin(worker, index, ())
        else:
            self._waiting.append((request, worker, index))
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
        assert sorted(self.ran) == list(range(len(self.tests)))
        return self.now

    def _stir(self) -> None:
        while self._awake:
            self._awake.popleft().advance()

    def _grant(self) -> None:
        asked = {request.id: (worker, index) for request, worker, index in self._waiting}
        for grant in decide([request for request, _, _ in self._waiting], self._free, 0):
            worker, index = asked[grant.request]
            self._waiting = [one for one in self._waiting if one[0].id != grant.request]
            taken = tuple(zip(grant.devices, grant.parts or (WHOLE,) * len(grant.devices), strict=True))
            for device, parts in taken:
                self._free[device] -= parts
                assert self._free[device] >= 0
            self._begin(worker, index, taken)

    def _begin(self, worker: Worker, index: int, taken: Iterable[tuple[str, int]]) -> None:
        self.ran.append(index)
        begun = self.now

        def end() -> None:
            for device, parts in taken:
                self._free[device] += parts
            self._grant()
            worker.done(self.now - begun)

        self.at(self.tests[index].seconds, end)
