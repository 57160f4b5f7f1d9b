"""The rule by which a free worker gets its next test. Pure: the scheduler and the plan use it.

- **A free worker gets the largest, then longest test that fits now**: the test that takes the largest part of the
  devices. So freed devices are never too few for the next test, and the run ends with small tests, which fill them all.
- **Else it gets the longest test that needs no device**, else it waits.
- **A test that takes about as long as everything else is urgent**: it goes first, but after tests
  that cannot run beside it.
- **If workers are scarcer than devices**, a test must leave each other free worker enough devices for some test.
- **If times differ much and none are stored**, small tests go before large ones: most tests have then begun, and the
  long ones are known, while there is enough left to run beside them.
- **A worker stays with its need and its module** unless a test is urgent, so that a warm world and module fixtures are
  used again. Two workers run tests of one module only when no other module is left.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request, decide

GUESS = 1.0
"""Expected seconds of a test if no time at all is known, neither stored nor from this session."""
URGENT = 0.7
"""A test is urgent if it takes at least this fraction of the least time in which all tests could end."""
SCARCE = 0.8
"""Workers are scarce if the tests take more than this fraction of the devices' time as the workers' time."""
UNEVEN = 3.0
"""Times differ much if a test took more than this factor times the average of the tests with its need."""
SHORT = 0.05
"""Tests expected to take fewer seconds than this are started together: a message takes some milliseconds."""
BATCH = 0.25
"""Expected seconds of the tests that are started together."""


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


def _no_times() -> list[float]:
    return [0, 0.0, 0.0]


@dataclass(slots=True)
class _Group:
    """The waiting tests of one need, and the times that tests of this need took in this session."""

    need: Need
    modules: dict[str, list[int]] = field(default_factory=dict)
    """The waiting tests by module, the longest last; the module with the longest test is the last one at first."""
    by_time: list[int] = field(default_factory=list)
    """The waiting tests, the longest last. A test that has started is removed when it is the last one."""
    known: float = 0.0
    """Sum of the stored seconds of waiting tests."""
    unknown: int = 0
    """Number of waiting tests without stored seconds."""
    times: list[float] = field(default_factory=_no_times)
    """Number, sum and maximum of the seconds of tests without stored seconds that have ended."""


@dataclass(frozen=True, slots=True)
class _Run:
    """The tests that a worker has started, and what they hold."""

    need: Need
    until: float
    takes: tuple[tuple[str, int], ...]
    slots: int


class RunOrder:
    """The waiting and the running tests, and what is free. Owned by the scheduler, or by the simulation of the plan."""

    def __init__(self, needs: Sequence[Need], tasks: Sequence[Task], free: Mapping[str, int], slots: int) -> None:
        """`free` maps each device to its free parts, `slots` is the number of CPU slots."""
        self.left = 0
        """Number of waiting tests."""
        self._tasks = tasks
        self._groups = [_Group(need) for need in needs]
        self._free, self._slots, self._all_slots = dict(free), slots, slots
        self._guess = median([task.stored for task in tasks if task.stored is not None] or [GUESS])
        self._times = _no_times()
        self._started: set[int] = set()
        self._runs: dict[Hashable, _Run] = {}
        self._last: dict[Hashable, Task] = {}
        """The last test of each worker."""
        self._bound = 0.0
        """Lower bound of the seconds until all tests have ended, at the last start."""
        for index in sorted(range(len(tasks)), key=lambda index: (self._time(index), -index)):
            self._add(index, list.append)
        for group in self._groups:
            by_longest = sorted(group.modules.items(), key=lambda item: (self._time(item[1][-1]), -item[1][-1]))
            group.modules = dict(by_longest)

    def put_back(self, index: int) -> None:
        """Have a started test wait again."""
        self._started.discard(index)
        self._add(index, lambda tests, index: insort(tests, index, key=self._time))

    def holds(self, worker: Hashable) -> tuple[tuple[str, int], ...]:
        """Return the devices that the tests of `worker` hold, each with its parts."""
        return self._runs[worker].takes

    def record(self, index: int, seconds: float) -> None:
        """Record the seconds that a test has taken."""
        if self._tasks[index].stored is None:
            for times in (self._times, self._groups[self._tasks[index].need].times):
                times[:] = times[0] + 1, times[1] + seconds, max(times[2], seconds)

    def end(self, worker: Hashable) -> None:
        """Free what the tests of `worker` hold; no-op if it runs none."""
        if (run := self._runs.pop(worker, None)) is not None:
            self._slots += run.slots
            for device, parts in run.takes:
                self._free[device] += parts

    def start(self, worker: Hashable, now: float, others: int, most: int | None = None) -> list[int]:
        """Start the next test of a free worker, if it is short with others; return their numbers, none if none fits.

        `others` is the number of other free workers, `most` that of the tests that may be started together.
        """
        groups = [group for group in self._groups if group.modules]
        loads: Counter[tuple[str, ...]] = Counter()
        work = 0.0
        for need, seconds in (
            *((group.need, group.known + group.unknown * self._average(group)) for group in groups),
            *((run.need, max(0.0, run.until - now)) for run in self._runs.values()),
        ):
            loads[need.candidates] += need.size * seconds  # type: ignore[assignment]
            work += seconds
        workers = len(self._runs) + 1 + others
        devices = max(loads.values(), default=0.0)
        self._bound = max(devices, work / workers)
        scarce = work / workers > SCARCE * devices
        uneven = not scarce and any(
            peak * count > UNEVEN * total for count, total, peak in (group.times for group in self._groups)
        )
        last = self._groups[self._last[worker].need] if worker in self._last else None

        widest = max((group.need.size for group in groups if self._is_urgent(self._longest(group))), default=-1.0)

        def rank(group: _Group) -> tuple[int, float, bool, float]:
            size, longest = group.need.size, self._longest(group)
            if size + widest > 1:
                return 0, -size, group is not last, -self.expected(longest)
            if self._is_urgent(longest):
                return 1, -self.expected(longest), False, 0.0
            part = size if uneven and group.unknown else -size
            return 2 if group.need.requests else 3, part, group is not last, -self.expected(longest)

        groups.sort(key=rank)
        if scarce and others:
            least = min(group.need.size for group in groups) if groups else 0.0
            groups = [one for one in groups if one.need.size + others * least < self._room(one.need) + 1e-6] or groups
        for group in groups:
            granted = decide(group.need.requests, self._free, self._slots)
            if len(granted) == len(group.need.requests):
                tests = self._take(group, worker, min(most or self.left, 1 + self.left // (4 * workers)))
                takes = tuple(pair for lease in granted for pair in lease.takes())
                slots = sum(lease.slots for lease in granted)
                self._runs[worker] = _Run(group.need, now + sum(map(self.expected, tests)), takes, slots)
                self._slots -= slots
                for device, parts in takes:
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

    def _take(self, group: _Group, worker: Hashable, most: int) -> list[int]:
        tests: list[int] = []
        seconds = 0.0
        while group.modules and len(tests) < most:
            index = self._next(group, worker)
            task, expected = self._tasks[index], self.expected(index)
            is_short = expected < SHORT and (task.stored is not None or group.times[0] > 0)
            if tests and not is_short:
                break
            tests.append(index)
            self._last[worker] = task
            self._started.add(index)
            group.modules[task.module].remove(index)
            if not group.modules[task.module]:
                del group.modules[task.module]
            self._count(task, -1)
            seconds += expected
            if not is_short or seconds >= BATCH:
                break
        return tests

    def _next(self, group: _Group, worker: Hashable) -> int:
        """Return the test of `group` for `worker`: of its module, else of a module of no worker, else the longest."""
        longest = self._longest(group)
        own = self._last[worker].module if worker in self._last else None
        busy = {task.module for task in self._last.values()}
        module = own if own in group.modules else next((m for m in reversed(group.modules) if m not in busy), None)
        chosen = longest if module is None else group.modules[module][-1]
        return longest if self._is_urgent(longest) and not self._is_urgent(chosen) else chosen

    def _longest(self, group: _Group) -> int:
        while group.by_time[-1] in self._started:
            group.by_time.pop()
        return group.by_time[-1]

    def _is_urgent(self, index: int) -> bool:
        return self.expected(index) >= URGENT * self._bound

    def _room(self, need: Need) -> float:
        """Return the free part of the candidates of a need, or of the CPU slots."""
        if need.candidates:
            return sum(self._free[device] for device in need.candidates) / WHOLE / len(need.candidates)
        return self._slots / max(1, self._all_slots)

    def _average(self, group: _Group) -> float:
        """Return the seconds that a test without a stored time is expected to take."""
        count, total, _ = group.times if group.times[0] else self._times
        return total / count if count else self._guess

    def _time(self, index: int) -> float:
        """Return the seconds by which waiting tests are sorted."""
        stored = self._tasks[index].stored
        return self._guess if stored is None else stored

    def _add(self, index: int, add: Callable[[list[int], int], None]) -> None:
        task = self._tasks[index]
        group = self._groups[task.need]
        add(group.modules.setdefault(task.module, []), index)
        add(group.by_time, index)
        self._count(task, 1)

    def _count(self, task: Task, sign: int) -> None:
        group = self._groups[task.need]
        group.known += sign * (task.stored or 0.0)
        group.unknown += sign * (task.stored is None)
        self.left += sign
