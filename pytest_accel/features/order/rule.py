"""The rule by which a free worker gets its next test. Pure: the scheduler and the plan use it.

- **A free worker gets the largest, then longest test that fits now**: the test that takes the largest part of the
  devices. So freed devices are never too few for the next test, and the run ends with small tests, which fill them all.
- **Else it gets the longest test that needs no device**, else it waits.
- **A test that takes about as long as everything else is urgent**: it goes first.
- **If workers are scarcer than devices**, a test must leave each other free worker enough devices for some test.
- **If times differ much and none are stored**, small tests go before large ones: most tests have then begun, and the
  long ones are known, while there is enough left to run beside them.
- **A worker stays with its need and its module** unless a test is urgent, so that a warm world and module fixtures are
  used again. Two workers run tests of one module only when no other module is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Lease, Request, decide

GUESS = 1.0
"""Expected seconds of a test if no time at all is known, neither stored nor from this session."""
URGENT = 0.7
"""A test is urgent if it takes at least this fraction of the least time in which all tests could end."""
SCARCE = 0.8
"""Workers are scarce if the tests take more than this fraction of the devices' time as the workers' time."""
UNEVEN = 3.0
"""Times differ much if a test took more than this factor times the average of the tests with its need."""
SHORT, BATCH = 0.05, 0.25
"""Tests of fewer seconds than `SHORT` are started together, for `BATCH` seconds: a message takes some milliseconds."""


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that a test takes while it runs."""

    requests: tuple[Request, ...] = ()
    """The requests of its world and of its driver; none: only a worker."""
    size: float = 0.0
    """The largest part that one of them takes of its candidates, or of the CPU slots, from 0 to 1."""
    candidates: tuple[str, ...] = ()
    """The candidates of that request; none for CPU slots."""


@dataclass(frozen=True, slots=True)
class Task:
    """A test as the rule sees it."""

    need: int
    """The number of its need."""
    module: str
    stored: float | None = None
    """Expected seconds, from earlier sessions; None if none are stored."""


@dataclass(slots=True)
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
    count: int = 0
    """Number of tests without stored seconds that have ended; `total` and `peak` are of their seconds."""
    total: float = 0.0
    peak: float = 0.0


class RunOrder:
    """The waiting and the running tests, and what is free. Owned by the scheduler, or by the simulation of the plan."""

    def __init__(self, needs: Sequence[Need], tasks: Sequence[Task], slots: int) -> None:
        """`slots` is the number of CPU slots."""
        self.left = 0
        """Number of waiting tests."""
        self._tasks = tasks
        self._groups = [_Group(need) for need in needs]
        names = (name for need in needs for request in need.requests for name in request.candidates)
        self._free, self._slots, self._all_slots = dict.fromkeys(names, WHOLE), slots, slots
        self._guess = median([task.stored for task in tasks if task.stored is not None] or [GUESS])
        self._runs: dict[Hashable, tuple[Need, float, Sequence[Lease]]] = {}
        """By worker: the need of the tests that it runs, when they will have ended, and what they hold."""
        self._started: set[int] = set()
        self._last: dict[Hashable, Task] = {}
        """The last test of each worker."""
        self._bound = 0.0
        """Lower bound of the seconds until all tests have ended, at the last start."""
        for index in sorted(range(len(tasks)), key=self.expected, reverse=True):
            self.put_back(index)
        for group in self._groups:
            for tests in (group.by_time, *group.modules.values()):
                tests.reverse()

    def put_back(self, index: int) -> None:
        """Have a test wait, for the first time or again."""
        task = self._tasks[index]
        self._groups[task.need].modules.setdefault(task.module, []).append(index)
        self._groups[task.need].by_time.append(index)
        self._started.discard(index)
        self._count(task, 1)

    def holds(self, worker: Hashable) -> tuple[tuple[str, int], ...]:
        """Return the devices that the tests of `worker` hold, each with its parts."""
        return tuple(pair for lease in self._runs[worker][2] for pair in lease.takes())

    def record(self, index: int, seconds: float) -> None:
        """Record the seconds that a test has taken."""
        if (task := self._tasks[index]).stored is None:
            group = self._groups[task.need]
            group.count, group.total, group.peak = group.count + 1, group.total + seconds, max(group.peak, seconds)

    def end(self, worker: Hashable) -> None:
        """Free what the tests of `worker` hold; no-op if it runs none."""
        if worker in self._runs:
            self._slots += sum(lease.slots for lease in self._runs[worker][2])
            for device, parts in self.holds(worker):
                self._free[device] += parts
            del self._runs[worker]

    def start(self, worker: Hashable, now: float, others: int, most: int | None = None) -> list[int]:
        """Start the next test of a free worker, if it is short with others; return their numbers, none if none fits.

        `others` is the number of other free workers, `most` that of the tests that may be started together.
        """
        waiting = [group for group in self._groups if group.modules]
        loads: Counter[tuple[str, ...]] = Counter()
        work = 0.0
        for need, seconds in (
            *((group.need, group.known + group.unknown * self._average(group)) for group in waiting),
            *((need, max(0.0, until - now)) for need, until, _ in self._runs.values()),
        ):
            loads[need.candidates] += need.size * seconds  # type: ignore[assignment]
            work += seconds
        workers = len(self._runs) + 1 + others
        devices = max(loads.values(), default=0.0)
        self._bound = max(devices, work / workers)
        scarce = work / workers > SCARCE * devices
        uneven = not scarce and any(one.peak * one.count > UNEVEN * one.total for one in self._groups)
        last = self._groups[self._last[worker].need] if worker in self._last else None
        found = [(group, index := self._next(group, worker), self.expected(index)) for group in waiting]

        def rank(one: tuple[_Group, int, float]) -> tuple[bool, bool, float, bool, float]:
            group, _, seconds = one
            part = group.need.size if uneven and group.unknown else -group.need.size
            return seconds < URGENT * self._bound, not group.need.requests, part, group is not last, -seconds

        found.sort(key=rank)
        if scarce and others:
            least = min((group.need.size for group in waiting), default=0.0)
            found = [
                one for one in found if one[0].need.size + others * least < self._room(one[0].need) + 1e-6
            ] or found
        for group, index, _ in found:
            leases = decide(group.need.requests, self._free, self._slots)
            if len(leases) == len(group.need.requests):
                tests = self._take(group, index, min(most or self.left, 1 + self.left // (4 * workers)))
                self._last[worker] = self._tasks[index]
                self._runs[worker] = group.need, now + sum(map(self.expected, tests)), leases
                self._slots -= sum(lease.slots for lease in leases)
                for device, parts in self.holds(worker):
                    self._free[device] -= parts
                return tests
        return []

    def likely(self, worker: Hashable) -> int | None:
        """Return the number of the waiting test that `worker` is most likely to get next; None if none waits."""
        groups = (self._groups[self._last[worker].need], *self._groups)
        return next((self._next(group, worker) for group in groups if group.modules), None)

    def expected(self, index: int) -> float:
        """Return the seconds that a test is expected to take."""
        task = self._tasks[index]
        return self._average(self._groups[task.need]) if task.stored is None else task.stored

    def _take(self, group: _Group, index: int, most: int) -> list[int]:
        """Return the test `index`, which waits no more; if it is short, with the short tests of its module."""
        module = self._tasks[index].module
        tests, seconds = group.modules[module], 0.0
        tests.append(tests.pop(tests.index(index)))
        taken: list[int] = []
        while tests and len(taken) < most and seconds < BATCH:
            task, expected = self._tasks[tests[-1]], self.expected(tests[-1])
            is_short = expected < SHORT and (task.stored is not None or group.count > 0)
            if taken and not is_short:
                break
            taken.append(tests.pop())
            self._started.add(taken[-1])
            self._count(task, -1)
            seconds += expected if is_short else BATCH
        if not tests:
            del group.modules[module]
        return taken

    def _next(self, group: _Group, worker: Hashable) -> int:
        """Return the test of `group` for `worker`: of its module, else of a module of no worker, else the longest.

        An urgent test goes before those of the worker's module.
        """
        while group.by_time[-1] in self._started:
            group.by_time.pop()
        longest = group.by_time[-1]
        own = self._last[worker].module if worker in self._last else None
        busy = {task.module for task in self._last.values()}
        module = own if own in group.modules else next((name for name in group.modules if name not in busy), None)
        chosen = longest if module is None else group.modules[module][-1]
        return longest if self.expected(longest) >= URGENT * self._bound > self.expected(chosen) else chosen

    def _room(self, need: Need) -> float:
        """Return the free part of the candidates of a need, or of the CPU slots."""
        if need.candidates:
            return sum(self._free[device] for device in need.candidates) / WHOLE / len(need.candidates)
        return self._slots / max(1, self._all_slots)

    def _average(self, group: _Group) -> float:
        """Return the seconds that a test without a stored time is expected to take."""
        return (group.total + 0.1 * self._guess) / (group.count + 0.1)

    def _count(self, task: Task, sign: int) -> None:
        group = self._groups[task.need]
        group.known += sign * (task.stored or 0.0)
        group.unknown += sign * (task.stored is None)
        self.left += sign
