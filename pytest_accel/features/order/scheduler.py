"""The scheduler that xdist's controller uses: sends to each worker the tests that the plan starts there.

An xdist worker starts a test only when it knows the next one, or that there is none. A test that is sent as the next
one would normally be tied to that worker for as long as the first test runs. Here it is sent *on hold*: the worker
skips it without a report unless it has received the order to run it (`worker_channels.py`). A test on hold tells the
worker which fixtures to keep for the likely next test, and can still be started on any other worker. Tests that are
shorter than such messages take are sent in batches, and not on hold.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from pytest_accel.core.clock import monotonic
from pytest_accel.features.order.backlog import Backlog, Task
from pytest_accel.features.order.plan import Running, Start, choose

_SHORT = 0.05
"""Tests expected to take fewer seconds than this are sent in batches."""
_BATCH = 0.25
"""Expected seconds of a batch."""
_SCARCE = 0.8
"""Workers are scarce if the remaining tests take the workers more than this fraction of the devices' time."""
_PLENTIFUL = 0.7
"""There are enough workers to try tests that may take long if that fraction is less than this."""


class DifferentTestsError(Exception):
    """A worker has collected other tests than the first workers, and no worker can run the remaining tests."""


class WorkerNode(Protocol):
    """The part of xdist's `WorkerController` that the scheduler uses."""

    @property
    def gateway(self) -> Any: ...

    @property
    def shutting_down(self) -> bool: ...

    def send_runtest_some(self, indices: Sequence[int]) -> None: ...

    def shutdown(self) -> None: ...


class Orders(Protocol):
    """Sends orders to a worker: to hold a test, or to run it after all. They arrive in order with xdist's messages."""

    def hold(self, node: Any, index: int) -> None: ...

    def go(self, node: Any, index: int) -> None: ...


@dataclass(slots=True, eq=False)
class _Worker:
    """The scheduler's view of one xdist worker."""

    node: WorkerNode
    ready: bool = False
    """True if it has collected the same tests as the others."""
    queue: deque[Task] = field(default_factory=deque)
    """The test that it runs, followed by those that it will certainly run."""
    on_hold: int | None = None
    """Index of the test that was sent on hold after the queue."""
    held: set[int] = field(default_factory=set)
    """Indices of the tests with a hold order that no go order has cancelled."""
    start: Start | None = None
    """The start whose devices it holds; None if it is idle."""
    since: float = 0.0
    """Time when it started the first test of the queue."""
    batch: int = 1
    """Number of tests that were sent last."""
    last_need: int | None = None
    """Number of the need of the last test that was sent."""
    module: str | None = None
    """Module of that test."""
    unreached: bool = False
    """True if it died before the tests in its queue could be sent."""


class DeviceScheduling:
    """An xdist scheduler that knows which devices tests need.

    Methods without a docstring are those of xdist's protocol for schedulers, ``xdist/scheduler/protocol.py``.
    """

    def __init__(
        self,
        collection: Sequence[str],
        backlog: Backlog,
        devices: dict[str, int],
        slots: int,
        orders: Orders,
        *,
        largest_batch: int | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`devices` maps each device to its parts that may be leased; `largest_batch` is ``--maxschedchunk``."""
        self.collection = list(collection)
        self._backlog = backlog
        self._free = dict(devices)
        self._width = max(1, len({name for need in backlog.needs for name in need.candidates}))
        """Number of devices that worlds may use."""
        self._slots = slots
        self._orders = orders
        self._largest_batch = largest_batch or len(self.collection)
        self._clock = clock
        self._workers: dict[Any, _Worker] = {}

    # Methods that xdist calls

    @property
    def nodes(self) -> list[Any]:
        return list(self._workers)

    @property
    def collection_is_completed(self) -> bool:
        return True

    @property
    def tests_finished(self) -> bool:
        return not self.has_pending

    @property
    def has_pending(self) -> bool:
        return bool(self._backlog.count) or any(worker.queue for worker in self._workers.values())

    def add_node(self, node: Any) -> None:
        assert node not in self._workers
        self._workers[node] = _Worker(node)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """Record the tests that a worker has collected. If they differ from the scheduler's, it gets no tests.

        Raise :class:`DifferentTestsError` if tests remain and no other worker can get them: xdist would wait forever.
        """
        worker = self._workers[node]
        worker.ready = list(collection) == self.collection
        if not worker.ready and self._backlog.count and not self._usable_workers:
            pairs = itertools.zip_longest(self.collection, collection, fillvalue="missing")
            place, theirs, own = next((place, *pair) for place, pair in enumerate(pairs, 1) if pair[0] != pair[1])
            raise DifferentTestsError(
                f"worker {node.gateway.id} has collected other tests than the workers before it, so "
                f"{self._backlog.count} remaining test(s) cannot be run: its test {place} is {own}, not {theirs}; "
                "all workers must collect the same tests in the same order"
            )

    def schedule(self) -> None:
        self._start_tests()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        worker = self._workers[node]
        if not worker.queue or worker.queue[0].index != item_index:
            return  # The worker has skipped a test on hold.
        worker.queue.popleft()
        worker.since = self._clock()
        self._backlog.record(item_index, duration)
        if not worker.queue:
            self._free_devices(worker)
        elif 2 * len(worker.queue) <= worker.batch:
            self._extend(worker)
        self._start_tests()

    def mark_test_pending(self, item: str) -> None:
        self._backlog.add(self.collection.index(item))
        self._start_tests()

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> NoReturn:
        """Not used: this scheduler never asks a worker to return tests."""
        raise NotImplementedError

    def remove_node(self, node: Any) -> str | None:
        """Remove a dead worker and return the test that it ran, or None; its other tests go to other workers.

        Raises KeyError if `node` is unknown.
        """
        worker = self._workers.pop(node)
        if not worker.queue:
            return None
        self._free_devices(worker)
        crashed = None if worker.unreached else worker.queue.popleft()
        for task in worker.queue:
            self._backlog.add(task.index)
        self._start_tests()
        return None if crashed is None else self.collection[crashed.index]

    # Starting tests

    @property
    def _usable_workers(self) -> list[_Worker]:
        """The workers that may get tests."""
        return [worker for worker in self._workers.values() if worker.ready and not worker.node.shutting_down]

    def _start_tests(self) -> None:
        """Start all tests that can start now; shut idle workers down if none remain."""
        idle = [worker for worker in self._usable_workers if not worker.queue]
        while idle and self._backlog.count:
            warm = {worker.last_need for worker in idle if worker.last_need is not None}
            start = self._choose(None, warm, len(idle) - 1)
            if start is None:
                return
            worker = _best_worker(idle, start.key)
            idle.remove(worker)
            self._start(worker, start)
        if not self._backlog.count:
            for worker in idle:
                worker.node.shutdown()

    def _choose(self, without: _Worker | None, warm: set[int], other_workers: int = 0) -> Start | None:
        """Return the plan's next start, as if the worker `without` were free.

        `other_workers` is the number of free workers besides the one that gets the test.
        """
        backlog = self._backlog
        busy = [worker for worker in self._workers.values() if worker.queue and worker is not without]
        running = [
            Running(worker.start.key, worker.start.devices, worker.start.slots, self._remaining_time(worker))
            for worker in busy
            if worker.start is not None
        ]
        free, slots = self._free, self._slots
        if without is not None and without.start is not None:
            free, slots = dict(free), slots + without.start.slots
            for device, parts in without.start.devices:
                free[device] += parts
        devices, work = self._bounds(running)
        other_workers = other_workers if work > _SCARCE * devices else 0
        try_first = work < _PLENTIFUL * devices
        return choose(
            backlog.offers(), running, free, slots, max(devices, work), warm, other_workers, try_first=try_first
        )

    def _bounds(self, running: Iterable[Running]) -> tuple[float, float]:
        """Return two lower bounds of the seconds that all tests still take: given by the devices and by the workers."""
        needs = [*self._backlog.totals(), *((self._backlog.need(one.key), one.left) for one in running)]
        devices = max(
            sum(need.devices * seconds for need, seconds in needs) / self._width,
            sum(seconds for need, seconds in needs if need.size > 0.5),
        )
        return devices, sum(seconds for _, seconds in needs) / max(1, len(self._usable_workers))

    def _remaining_time(self, worker: _Worker) -> float:
        """Return the expected seconds until `worker` is free. A test that is overdue counts as half done."""
        passed = self._clock() - worker.since
        head, *rest = worker.queue
        expected = self._backlog.expected(head)
        left = expected - passed if passed <= expected else passed
        return left + sum(self._backlog.expected(task) for task in rest)

    def _start(self, worker: _Worker, start: Start) -> None:
        for device, parts in start.devices:
            self._free[device] -= parts
        self._slots -= start.slots
        worker.start, worker.since = start, self._clock()
        self._send(worker, self._take(worker, start))

    def _extend(self, worker: _Worker) -> None:
        """Send a worker more tests of its current need, if the plan would give its devices to them."""
        if worker.node.shutting_down or not self._backlog.count or worker.last_need is None:
            return
        start = self._choose(worker, {worker.last_need})
        if start is not None and start.key == worker.last_need:
            tasks = self._take(worker, start)
            self._send(worker, tasks)

    def _take(self, worker: _Worker, start: Start) -> list[Task]:
        backlog = self._backlog
        tasks = [backlog.take(start.key, worker.module, start.limit)]
        expected = backlog.expected(tasks[0])
        if backlog.has_estimate(tasks[0]) and expected < _SHORT:
            room = min(self._largest_batch, 1 + backlog.count // (4 * len(self._workers)))
            size = min(room, math.ceil(_BATCH / max(expected, 0.001)))
            while len(tasks) < size:
                following = backlog.peek(start.key, tasks[-1].module)
                if following is None or backlog.expected(backlog.tasks[following]) >= _SHORT:
                    break
                tasks.append(backlog.take(start.key, tasks[-1].module))
        worker.batch, worker.last_need, worker.module = len(tasks), start.key, tasks[-1].module
        return tasks

    def _send(self, worker: _Worker, tasks: list[Task]) -> None:
        indices = [task.index for task in tasks]
        if worker.on_hold in indices:
            # The worker has this test already, on hold after its queue, so it runs before the tests sent now.
            position = indices.index(worker.on_hold)
            tasks.insert(0, tasks.pop(position))
            indices.pop(position)
        for task in tasks:
            if task.index in worker.held:
                worker.held.remove(task.index)
                self._orders.go(worker.node, task.index)
        was_busy = bool(worker.queue)
        worker.queue.extend(tasks)
        worker.on_hold = self._likely_next(worker)
        if worker.on_hold is not None:
            worker.held.add(worker.on_hold)
            self._orders.hold(worker.node, worker.on_hold)
            indices.append(worker.on_hold)
        if indices:
            try:
                worker.node.send_runtest_some(indices)
            except OSError:  # The worker has died; xdist will call remove_node().
                worker.unreached = not was_busy
                return
        if worker.on_hold is None:
            worker.node.shutdown()

    def _likely_next(self, worker: _Worker) -> int | None:
        """Return the remaining test that the worker is most likely to run next, or None if none remain."""
        assert worker.last_need is not None
        following = self._backlog.peek(worker.last_need, worker.module)
        if following is None:
            offers = self._backlog.offers()
            following = self._backlog.peek(offers[0].key, worker.module) if offers else None
        return following

    def _free_devices(self, worker: _Worker) -> None:
        start, worker.start = worker.start, None
        if start is not None:
            for device, parts in start.devices:
                self._free[device] += parts
            self._slots += start.slots


def _best_worker(idle: Sequence[_Worker], key: int) -> _Worker:
    """Return an idle worker that has run a test of the same need last, else one that has run none, else the first."""
    return min(idle, key=lambda worker: (worker.last_need != key, worker.last_need is not None))
