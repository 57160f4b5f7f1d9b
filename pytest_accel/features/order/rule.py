"""The rule by which a free worker gets its next test. Pure: the scheduler and the plan use it.

The page ``docs/project/architecture.md`` ("The order of tests") has the rule in words. Not there: workers that are
scarcer than devices leave enough devices for the other free workers, and two workers run tests of one module only when
no other module is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Lease, Request, decide

URGENT = 0.7
"""A test is urgent if it takes at least this fraction of the least time in which all tests could end."""
SCARCE = 0.8
"""Workers are scarce if the tests take more than this fraction of the devices' time as the workers' time."""
UNEVEN = 3.0
"""Times differ much if a test took more than this factor times the average of the tests with its need."""
SHORT, BATCH = 0.05, 0.25
"""Tests of fewer seconds than `SHORT` are started together, for `BATCH` seconds: a message takes some milliseconds."""


class Need(NamedTuple):
    """The resources that a test takes while it runs."""

    requests: tuple[Request, ...] = ()
    """The requests of its world and of its driver; none: only a worker."""
    size: float = 0.0
    """The largest part that one of them takes of its candidates, or of the CPU slots, from 0 to 1."""
    candidates: tuple[str, ...] = ()
    """The candidates of that request; none for CPU slots."""


class Task(NamedTuple):
    """A test as the rule, the plan and the division into parts see it."""

    nodeid: str
    need: Need = Need()
    seconds: float | None = None
    """Expected seconds, from earlier sessions; None if none are stored."""

    @property
    def module(self) -> str:
        return self.nodeid.partition("::")[0]


def guess(tasks: Sequence[Task]) -> float:
    """Return the seconds assumed for a test without a stored time: the median of the others, or 1."""
    return median([task.seconds for task in tasks if task.seconds is not None] or [1.0])


def total(times: Iterable[tuple[Need, float]]) -> tuple[float, float]:
    """Return the seconds for which tests take all devices of the most wanted kind, and the sum of their seconds."""
    loads: Counter[tuple[str, ...]] = Counter()
    work = 0.0
    for need, seconds in times:
        loads[need.candidates] += need.size * seconds  # type: ignore[assignment]
        work += seconds
    return max(loads.values(), default=0.0), work


@dataclass(slots=True, eq=False)
class _Group:
    """The waiting tests of one need, and the times that tests of this need took in this session."""

    need: Need
    modules: dict[str, list[int]] = field(default_factory=dict)
    """The waiting tests by module, the longest last; the module with the longest test is the first one."""
    by_time: list[int] = field(default_factory=list)
    """The waiting tests, the longest last. A test that has started is removed when it is the last one."""
    known: float = 0.0
    """Sum of the stored seconds of waiting tests."""
    unknown: int = 0
    """Number of waiting tests without stored seconds."""
    ended: int = 0
    """Number of tests without stored seconds that have ended; `total` and `peak` are of their seconds."""
    total: float = 0.0
    peak: float = 0.0


class RunOrder:
    """The waiting and the running tests, and what is free. Owned by the scheduler, or by the simulation of the plan."""

    def __init__(self, tasks: Sequence[Task], slots: int) -> None:
        """`slots` is the number of CPU slots."""
        groups = {task.need: _Group(task.need) for task in tasks}
        self._tasks, self._groups, self._group = tasks, list(groups.values()), [groups[task.need] for task in tasks]
        self._free = {name: WHOLE for need in groups for request in need.requests for name in request.candidates}
        self._slots, self._all_slots, self._guess = slots, slots, guess(tasks)
        self._waiting: set[int] = set()
        self._runs: dict[Hashable, tuple[Need, float, Sequence[Lease]]] = {}
        """By worker: the need of the tests that it runs, when they will have ended, and what they hold."""
        self._last: dict[Hashable, int] = {}
        """The last test of each worker."""
        longest_first = sorted(range(len(tasks)), key=self._expected, reverse=True)
        for index in longest_first:
            self._group[index].modules[tasks[index].module] = []
        for index in reversed(longest_first):
            self.put_back(index)

    @property
    def left(self) -> int:
        """Number of waiting tests."""
        return len(self._waiting)

    def put_back(self, index: int) -> None:
        """Have a test wait, for the first time or again."""
        self._group[index].modules.setdefault(self._tasks[index].module, []).append(index)
        self._group[index].by_time.append(index)
        self._waiting.add(index)
        self._count(index, 1)

    def holds(self, worker: Hashable) -> tuple[tuple[str, int], ...]:
        """Return the devices that the tests of `worker` hold, each with its parts."""
        return tuple(pair for lease in self._runs[worker][2] for pair in lease.takes())

    def record(self, index: int, seconds: float) -> None:
        """Record the seconds that a test has taken."""
        if self._tasks[index].seconds is None:
            group = self._group[index]
            group.ended, group.total, group.peak = group.ended + 1, group.total + seconds, max(group.peak, seconds)

    def end(self, worker: Hashable) -> None:
        """Free what the tests of `worker` hold; no-op if it runs none."""
        if worker in self._runs:
            self._take(worker, -1)
            del self._runs[worker]

    def start(self, worker: Hashable, now: float, others: int, most: int | None = None) -> list[int]:
        """Start the next test of a free worker, if it is short with others; return their numbers, none if none fits.

        `others` is the number of other free workers, `most` that of the tests that may be started together.
        """
        waiting = [group for group in self._groups if group.modules]
        rest = [(group.need, group.known + group.unknown * self._average(group)) for group in waiting]
        devices, work = total([*rest, *((need, max(0.0, until - now)) for need, until, _ in self._runs.values())])
        workers = len(self._runs) + 1 + others
        urgent = URGENT * max(devices, work / workers)
        scarce = work / workers > SCARCE * devices
        uneven = not scarce and any(one.peak * one.ended > UNEVEN * one.total for one in self._groups)
        # The part of the devices that the other free workers need for their tests.
        reserved = others * min((group.need.size for group in waiting), default=0.0) if scarce else 0.0
        last = self._group[self._last[worker]] if worker in self._last else None

        def rank(one: tuple[_Group, int]) -> tuple[bool, bool, bool, float, bool, float]:
            (requests, size, names), seconds = one[0].need, self._expected(one[1])
            room = sum(map(self._free.__getitem__, names)) / WHOLE / len(names) if names else self._room()
            part = size if uneven and one[0].unknown else -size
            crowds = reserved > 0 and size + reserved > room
            return crowds, seconds < urgent, not requests, part, one[0] is not last, -seconds

        for group, index in sorted(((group, self._next(group, worker, urgent)) for group in waiting), key=rank):
            leases = decide(group.need.requests, self._free, self._slots)
            if len(leases) == len(group.need.requests):
                tests = self._batch(group, index, min(most or self.left, 1 + self.left // (4 * workers)))
                self._last[worker] = index
                self._runs[worker] = group.need, now + sum(map(self._expected, tests)), leases
                self._take(worker, 1)
                return tests
        return []

    def likely(self, worker: Hashable) -> int | None:
        """Return the number of the waiting test that `worker` is most likely to get next; None if none waits."""
        groups = (self._group[self._last[worker]], *self._groups)
        return next((self._next(group, worker) for group in groups if group.modules), None)

    def _batch(self, group: _Group, index: int, most: int) -> list[int]:
        """Return the test `index`, which waits no more; if it is short, with the short tests of its module."""
        module = self._tasks[index].module
        tests, batch = group.modules[module], [index]
        tests.remove(index)
        while tests and len(batch) < most and self._is_short(batch[-1]) and self._is_short(tests[-1]):
            if sum(map(self._expected, batch)) >= BATCH:
                break
            batch.append(tests.pop())
        if not tests:
            del group.modules[module]
        for one in batch:
            self._waiting.remove(one)
            self._count(one, -1)
        return batch

    def _next(self, group: _Group, worker: Hashable, urgent: float = float("inf")) -> int:
        """Return the test of `group` for `worker`: of its module, else of a module of no worker, else the longest.

        A test of at least `urgent` seconds goes before those of the worker's module.
        """
        while group.by_time[-1] not in self._waiting:
            group.by_time.pop()
        longest = group.by_time[-1]
        own = self._tasks[self._last[worker]].module if worker in self._last else None
        busy = {self._tasks[index].module for index in self._last.values()}
        module = own if own in group.modules else next((name for name in group.modules if name not in busy), None)
        chosen = longest if module is None else group.modules[module][-1]
        return longest if self._expected(longest) >= urgent > self._expected(chosen) else chosen

    def _take(self, worker: Hashable, sign: int) -> None:
        self._slots -= sign * sum(lease.slots for lease in self._runs[worker][2])
        for device, parts in self.holds(worker):
            self._free[device] -= sign * parts

    def _room(self) -> float:
        return self._slots / max(1, self._all_slots)

    def _expected(self, index: int) -> float:
        """Return the seconds that a test is expected to take."""
        seconds = self._tasks[index].seconds
        return self._average(self._group[index]) if seconds is None else seconds

    def _is_short(self, index: int) -> bool:
        known = self._tasks[index].seconds is not None or self._group[index].ended > 0
        return known and self._expected(index) < SHORT

    def _average(self, group: _Group) -> float:
        """Return the seconds that a test without a stored time is expected to take."""
        return (group.total + 0.1 * self._guess) / (group.ended + 0.1)

    def _count(self, index: int, sign: int) -> None:
        group, seconds = self._group[index], self._tasks[index].seconds
        group.known += sign * (seconds or 0.0)
        group.unknown += sign * (seconds is None)
