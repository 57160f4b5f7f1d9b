"""The scheduler that xdist's controller asks: sends each worker what the plan starts there.

A worker of xdist begins a test when it knows the one after it, or that there is none. So a test that is sent as the
one after is lost to all other workers while the first one runs, however long that takes. Here it is sent *on hold*:
the worker passes over it unless it has been told to go on (`worker_hooks.py`). It only says which test is likely
to come next, and so which fixtures stay, and it remains to be had for every worker. Tests that are shorter than what
such messages cost are sent several at a time, and not on hold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from pytest_accel.core.clock import monotonic
from pytest_accel.schedule.backlog import Backlog, Task
from pytest_accel.schedule.plan import Running, Start, choose

_SHORT = 0.05
_BATCH = 0.25
"""Tests of fewer than `_SHORT` seconds are sent together, for about so many seconds."""
_SCARCE = 0.8
"""Workers are scarce if what remains takes them at least this part of the time that it takes the devices."""
_PLENTIFUL = 0.7
"""And there are enough of them to try what may last long if it is less than this part."""


class Node(Protocol):
    """The part of xdist's `WorkerController` that is used."""

    @property
    def shutting_down(self) -> bool: ...

    def send_runtest_some(self, indices: Sequence[int]) -> None: ...

    def shutdown(self) -> None: ...


class Orders(Protocol):
    """Tells a worker which of the tests that it is sent are on hold; in order with what it is sent."""

    def hold(self, node: Any, index: int) -> None: ...

    def go(self, node: Any, index: int) -> None: ...


@dataclass(slots=True, eq=False)
class _Worker:
    node: Any
    ready: bool = False
    """Whether it has collected the same tests as the others."""
    queue: deque[Task] = field(default_factory=deque)
    """What it runs, and then certainly will run."""
    next: int | None = None
    """The test on hold behind these."""
    held: set[int] = field(default_factory=set)
    """What it was told to hold, and not since to go on with."""
    start: Start | None = None
    since: float = 0.0
    """When it began the first of the queue."""
    batch: int = 1
    last: int | None = None
    """The need of the last test, and its module."""
    module: str | None = None
    unreached: bool = False
    """Whether it was gone before it could be sent what is in its queue."""


class DeviceScheduling:
    """An xdist scheduler that knows what tests need. The methods without a word are those of xdist's own schedulers.

    Their protocol: ``xdist/scheduler/protocol.py``.
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
        """`devices` are the parts of each that the session may give out; `largest_batch` is ``--maxschedchunk``."""
        self.collection = list(collection)
        self._backlog = backlog
        self._free = dict(devices)
        self._slots = slots
        self._orders = orders
        self._largest_batch = largest_batch or len(self.collection)
        self._clock = clock
        self._workers: dict[Any, _Worker] = {}

    # What xdist asks

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
        """A worker that has collected other tests gets none."""
        self._workers[node].ready = list(collection) == self.collection

    def schedule(self) -> None:
        self._settle()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        worker = self._workers[node]
        if not worker.queue or worker.queue[0].index != item_index:
            return  # It has passed over one on hold.
        worker.queue.popleft()
        worker.since = self._clock()
        self._backlog.saw(item_index, duration)
        if not worker.queue:
            self._release(worker)
        elif 2 * len(worker.queue) <= worker.batch:
            self._extend(worker)
        self._settle()

    def mark_test_pending(self, item: str) -> None:
        self._backlog.add(self.collection.index(item))
        self._settle()

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> NoReturn:
        """The answer to a request to give tests back, which is never made."""
        raise NotImplementedError

    def remove_node(self, node: Any) -> str | None:
        """The test that a worker which is gone was running; others get what it had not begun. KeyError if unknown."""
        worker = self._workers.pop(node)
        if not worker.queue:
            return None
        self._release(worker)
        crashed = None if worker.unreached else worker.queue.popleft()
        for task in worker.queue:
            self._backlog.add(task.index)
        self._settle()
        return None if crashed is None else self.collection[crashed.index]

    # What is sent

    def _settle(self) -> None:
        """Start all that can start now."""
        idle = [
            worker
            for worker in self._workers.values()
            if worker.ready and not worker.queue and not worker.node.shutting_down
        ]
        while idle and self._backlog.count:
            warm = {worker.last for worker in idle if worker.last is not None}
            start = self._choose(None, warm, len(idle) - 1)
            if start is None:
                return
            worker = _fittest(idle, start.key)
            idle.remove(worker)
            self._start(worker, start)
        if not self._backlog.count:
            for worker in idle:
                worker.node.shutdown()

    def _choose(self, without: _Worker | None, warm: set[int], hands: int = 0) -> Start | None:
        """The plan's next start, if `without` were free and besides it `hands` others."""
        backlog = self._backlog
        busy = [worker for worker in self._workers.values() if worker.queue and worker is not without]
        running = [
            Running(worker.start.key, worker.start.devices, worker.start.slots, self._left(worker))
            for worker in busy
            if worker.start is not None
        ]
        free, slots = self._free, self._slots
        if without is not None and without.start is not None:
            free, slots = dict(free), slots + without.start.slots
            for device, parts in without.start.devices:
                free[device] += parts
        devices, work = self._bounds(running)
        hands = hands if work > _SCARCE * devices else 0
        try_first = work < _PLENTIFUL * devices
        return choose(backlog.offers(), running, free, slots, max(devices, work), warm, hands, try_first=try_first)

    def _bounds(self, running: Iterable[Running]) -> tuple[float, float]:
        """The least number of seconds that all that remains can take, as far as is known: by devices, by workers."""
        needs = [*self._backlog.totals(), *((self._backlog.need(one.key), one.left) for one in running)]
        workers = sum(worker.ready and not worker.node.shutting_down for worker in self._workers.values())
        devices = max(
            sum(need.devices * seconds for need, seconds in needs) / max(1, len(self._free)),
            sum(seconds for need, seconds in needs if need.size > 0.5),
        )
        return devices, sum(seconds for _, seconds in needs) / max(1, workers)

    def _left(self, worker: _Worker) -> float:
        """Expected seconds until a worker is free. What has taken longer than expected is taken to be half done."""
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
        """Send more of the tests that a worker runs several of, if nothing else is to have its devices."""
        if worker.node.shutting_down or not self._backlog.count or worker.last is None:
            return
        start = self._choose(worker, {worker.last})
        if start is not None and start.key == worker.last:
            tasks = self._take(worker, start)
            self._send(worker, tasks)

    def _take(self, worker: _Worker, start: Start) -> list[Task]:
        backlog = self._backlog
        tasks = [backlog.take(start.key, worker.module, start.limit)]
        expected = backlog.expected(tasks[0])
        if backlog.is_sure(tasks[0]) and expected < _SHORT:
            room = min(self._largest_batch, 1 + backlog.count // (4 * len(self._workers)))
            size = min(room, math.ceil(_BATCH / max(expected, 0.001)))
            while len(tasks) < size:
                following = backlog.peek(start.key, tasks[-1].module)
                if following is None or backlog.expected(backlog.tasks[following]) >= _SHORT:
                    break
                tasks.append(backlog.take(start.key, tasks[-1].module))
        worker.batch, worker.last, worker.module = len(tasks), start.key, tasks[-1].module
        return tasks

    def _send(self, worker: _Worker, tasks: list[Task]) -> None:
        indices = [task.index for task in tasks]
        if worker.next in indices:
            # It is there already. Only as the first of them: what is on hold before it would run with it.
            at = indices.index(worker.next)
            tasks.insert(0, tasks.pop(at))
            indices.pop(at)
        for task in tasks:
            if task.index in worker.held:
                worker.held.remove(task.index)
                self._orders.go(worker.node, task.index)
        begun = bool(worker.queue)
        worker.queue.extend(tasks)
        worker.next = self._following(worker)
        if worker.next is not None:
            worker.held.add(worker.next)
            self._orders.hold(worker.node, worker.next)
            indices.append(worker.next)
        if indices:
            try:
                worker.node.send_runtest_some(indices)
            except OSError:  # It has died, of which xdist tells next.
                worker.unreached = not begun
                return
        if worker.next is None:
            worker.node.shutdown()

    def _following(self, worker: _Worker) -> int | None:
        """The remaining test that is most likely to be the worker's next; None: there is none."""
        assert worker.last is not None
        following = self._backlog.peek(worker.last, worker.module)
        if following is None:
            offers = self._backlog.offers()
            following = self._backlog.peek(offers[0].key, worker.module) if offers else None
        return following

    def _release(self, worker: _Worker) -> None:
        start, worker.start = worker.start, None
        if start is not None:
            for device, parts in start.devices:
                self._free[device] += parts
            self._slots += start.slots


def _fittest(idle: Sequence[_Worker], key: int) -> _Worker:
    """The worker that has run a test of the same need last, else one that has run none, else the first."""
    return min(idle, key=lambda worker: (worker.last != key, worker.last is not None))
