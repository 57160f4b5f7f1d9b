"""The scheduler of xdist's controller, and the rule by which it gives a free worker its next test.

It counts devices and grants nothing. A worker starts a test when it knows the next one, which binds it to that. So it
gets a *hint*: it keeps the fixtures of that test, and passes over the hint when it gets a test. The index of a hint is
the index of its test minus the number of tests, which denotes the same item of a list.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Sequence
from math import inf
from typing import Any

import pytest

from pytest_accel.features.order import stored_durations
from pytest_accel.features.order.tasks import CHANNEL, Need, Task, add_load, seconds_of, size, tasks_of
from pytest_accel.messages.struct_messages import decode

URGENT = 0.7
"""A test is urgent if it takes at least this fraction of the least time in which the waiting tests could end."""
SCARCE = 0.8
"""Workers are scarce if the tests take more than this fraction of the devices' time as the workers' time."""


class AccelScheduling:
    """A plugin of the controller, and its scheduler: xdist's, until the collection shows that a test needs another.

    xdist has no hook after the collection that could replace it. Its header shows the name of this class.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._received: list[bytes] = []
        """The needs that workers have sent, all the same; empty if no test needs a world or a resource.

        Threads receive them, and cannot decode two at a time.
        """
        self._scheduler: Any = None
        self.config = config  # pytest-rerunfailures uses it.

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of xdist's protocol for schedulers, ``xdist/scheduler/protocol.py``."""
        return getattr(self._scheduler, name)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        channel = node.workerinput[CHANNEL] = node.gateway.newchannel()
        channel.setcallback(self._received.append)

    @pytest.hookimpl(optionalhook=True, wrapper=True, trylast=True)
    def pytest_xdist_make_scheduler(self) -> Generator[None, Any, Any]:
        self._scheduler = yield
        # Keep a scheduler that another plugin has made.
        return self if type(self._scheduler).__module__.partition(".")[0] == "xdist" else self._scheduler

    def schedule(self) -> None:
        own = self._scheduler
        first, *others = getattr(own, "node2collection", {0: []}).values()
        # xdist's own scheduler reports collections that differ.
        if self._received and first and all(other == first for other in others):
            needs = decode(self._received[0], list[Need])
            tasks = tasks_of(first, needs, stored_durations.recall(self.config))
            stored_durations.record_times(self.config)
            self._scheduler = RunOrder(tasks, len(own.nodes))
            for node in own.nodes:
                self._scheduler.add_node(node)
                self._scheduler.add_node_collection(node, first)
        self._scheduler.schedule()


class RunOrder:
    """A scheduler with the methods of xdist's protocol. The plan uses `idle`, `started` and `end` alone.

    1. A free worker gets the largest, then longest test that fits now, else the longest one without a device. The end
       of the run then consists of small tests, which fill all devices.
    2. A test that takes about as long as everything else is urgent and goes first.
    3. If workers are scarcer than devices, a test must leave each other free worker enough devices for some test.
    4. One worker takes small tests before large ones, of tests without a stored time, unless workers are scarce.
    5. A worker stays with its need and its module, unless a test is urgent.
    """

    collection_is_completed = has_pending = True  # xdist asks before it shows the name of a scheduler.

    def __init__(self, tasks: Sequence[Task], workers: int) -> None:
        self.collection = [task.nodeid for task in tasks]
        self.nodes: list[Any] = []
        self.idle: list[Any] = []
        """The workers that wait for a test. The last of them was the last to run a test."""
        self._tasks, self._seconds, self._workers = tasks, seconds_of(tasks), workers
        self._left, self._loads = 0, defaultdict[object, float](float)
        self._waiting: dict[Need, dict[str, deque[int]]] = {task.need: {} for task in tasks}
        """The waiting tests by need and module: the longest first, also of modules; a started module comes last."""
        self._free = {kind: 1.0 for need in self._waiting for kind, _, _ in need}
        """The free part of the devices of each kind."""
        self._runs: dict[Any, int] = {}
        """The test that each worker runs."""
        self._last: dict[Any, Task] = {}
        """The last test of each worker."""
        for index in sorted(range(len(tasks)), key=self._seconds.__getitem__, reverse=True):
            self._wait(index)
        self._scarce = self._loads["workers"] > SCARCE * max(map(self._loads.__getitem__, self._free), default=0.0)

    @property
    def tests_finished(self) -> bool:
        return not self._left and not self._runs

    def add_node(self, node: Any) -> None:
        self.nodes.append(node)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """Have a worker wait for tests. Exit if a replacement has collected other tests: xdist would wait."""
        if self._left and list(collection) != self.collection:
            pytest.exit(
                f"worker {node.gateway.id} has collected other tests than the workers before it, so {self._left} "
                "remaining test(s) cannot be run; all workers must collect the same tests in the same order",
                pytest.ExitCode.TESTS_FAILED,
            )
        self.idle.insert(0, node)

    def schedule(self) -> None:
        """Start all tests that can start now; shut idle workers down if none remain."""
        self.idle = [node for node in self.idle if not node.shutting_down]
        for node, index in self.started():
            needs = (self._tasks[index].need, *self._waiting)
            hint = next((self._next(need, node) for need in needs if self._waiting[need]), None)
            try:
                node.send_runtest_some([index] if hint is None else [index, hint - len(self._tasks)])
            except OSError:  # The worker has died; xdist will call remove_node(), and no test has crashed.
                self._wait(self.end(node))
            else:
                if hint is None:
                    node.shutdown()
        for node in () if self._left else self.idle:
            node.shutdown()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        if item_index >= 0:  # Below zero, it is a hint.
            self.end(node)
            self.idle.append(node)
            self.schedule()

    def mark_test_pending(self, item: str) -> None:
        self._wait(self.collection.index(item))
        self.schedule()

    def remove_node(self, node: Any) -> str | None:
        """Remove a worker that has ended or died; return the test that it ran, or None."""
        self.nodes, self.idle = ([one for one in nodes if one is not node] for nodes in (self.nodes, self.idle))
        crashed = self.collection[self.end(node)] if node in self._runs else None
        self.schedule()
        return crashed

    def started(self) -> Iterator[tuple[Any, int]]:
        """Start the tests that can start now, and yield the worker and the index of each."""
        while self.idle and (index := self._start(self.idle[-1])) is not None:
            yield self.idle.pop(), index

    def end(self, worker: Any) -> int:
        """Free the devices and resources of the test of `worker`, and return the test."""
        index = self._runs.pop(worker)
        self._free.update({kind: self._free[kind] + part for kind, _, part in self._tasks[index].need})
        return index

    def _start(self, worker: Any) -> int | None:
        """Start the next test of an idle worker, and return it; None if none fits."""
        waiting = [need for need, modules in self._waiting.items() if modules]
        urgent = URGENT * max(self._loads.values())
        # One worker begins with the small tests, so that long tests are found while large tests can run beside them.
        small = not self._scarce and worker == next(iter(self._last), worker)
        # The part of the devices that the other idle workers need for their tests.
        reserved = self._scarce * (len(self.idle) - 1) * min((size(need) for need in waiting), default=0.0)
        last = self._last.get(worker, Task("")).need

        def rank(index: int) -> tuple[bool, bool, bool, float, bool, float]:
            need, seconds = self._tasks[index].need, self._seconds[index]
            part = size(need) if small and self._tasks[index].seconds is None else -size(need)
            return not self._fits(need, reserved), seconds < urgent, not need, part, need != last, -seconds

        for index in sorted((self._next(need, worker, urgent) for need in waiting), key=rank):
            task = self._tasks[index]
            if self._fits(task.need):
                tests = self._waiting[task.need].pop(task.module)
                tests.popleft()
                if tests:
                    self._waiting[task.need][task.module] = tests
                self._last[worker], self._runs[worker] = task, index
                self._count(index, -1)
                self._free.update({kind: self._free[kind] - part for kind, _, part in task.need})
                return index
        return None

    def _next(self, need: Need, worker: Any, urgent: float = inf) -> int:
        """Return the waiting test of `need` for `worker`: an urgent test, else of its module, else of no worker's."""
        modules, busy = self._waiting[need], {task.module for task in self._last.values()}
        first, own = next(iter(modules)), self._last.get(worker, Task("")).module
        if self._seconds[modules[first][0]] >= urgent:
            own = first
        elif own not in modules:
            own = next((name for name in modules if name not in busy), first)
        return modules[own][0]

    def _wait(self, index: int) -> None:
        task = self._tasks[index]
        self._waiting[task.need].setdefault(task.module, deque()).append(index)
        self._count(index, 1)

    def _count(self, index: int, sign: int) -> None:
        self._left += sign
        add_load(self._loads, self._tasks[index].need, sign * self._seconds[index], self._workers)

    def _fits(self, need: Need, reserved: float = 0.0) -> bool:
        return all(part + reserved <= self._free[kind] + 1e-9 for kind, _, part in need)
