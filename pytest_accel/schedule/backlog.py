"""The tests that have not been started, by what they need and how long they take. No step looks at all of them."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from pytest_accel.leases.policy import Request
from pytest_accel.schedule.plan import Offer

GUESS = 1.0
"""Expected seconds of a test of which nothing is known, as long as none has been seen."""
RISKY = 3.0
"""Tests without a remembered time may last long where one has taken so many times the average of its need."""
_SHORT = 0.1
_STEP = 1.2
"""Tests shorter than `_SHORT` seconds, or less than this factor apart, count as equally long."""


@dataclass(frozen=True, slots=True)
class Task:
    """One test."""

    index: int
    """Its number in the collection."""
    need: int
    """The number of its need."""
    module: str
    expected: float | None = None
    """Seconds, remembered from earlier sessions; None: never seen."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a test takes while it runs."""

    request: Request | None = None
    """None: nothing but a worker."""
    size: float = 0.0
    """The part of all devices that would do."""
    devices: float = 0.0
    """How many devices, where parts count as such."""


@dataclass(slots=True)
class _Level:
    """Tests of one need that take about as long, by module."""

    peak: float = 0.0
    count: int = 0
    modules: dict[str, deque[Task]] = field(default_factory=dict)


@dataclass(slots=True)
class _Bucket:
    need: Need
    levels: dict[int, _Level] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    """The numbers of the levels in which there are tests, ascending."""
    count: int = 0
    known: float = 0.0
    """Expected seconds of all whose time is known."""
    unknown: int = 0
    seen: int = 0
    seconds: float = 0.0
    """What `seen` tests without a remembered time have taken in this session."""
    peak: float = 0.0
    """The longest of them."""


class Backlog:
    """Remaining tests. Every method takes a time that does not grow with their number, but for the first filling."""

    def __init__(self, needs: list[Need], tasks: list[Task]) -> None:
        self.tasks = tasks
        self.count = 0
        self._buckets = [_Bucket(need) for need in needs]
        times = [task.expected for task in tasks if task.expected is not None]
        self._guess = median(times) if times else GUESS
        self._seen, self._seconds = 0, 0.0
        for task in tasks:
            self.add(task.index)

    def add(self, index: int) -> None:
        """A test that is (again) to be run."""
        task = self.tasks[index]
        bucket = self._buckets[task.need]
        time = self._guess if task.expected is None else task.expected
        number = 0 if time <= _SHORT else math.ceil(math.log(time / _SHORT, _STEP))
        level = bucket.levels.get(number)
        if level is None:
            level = bucket.levels[number] = _Level()
        if not level.count:
            insort(bucket.order, number)
        level.count += 1
        level.peak = max(level.peak, time)
        level.modules.setdefault(task.module, deque()).append(task)
        bucket.count += 1
        self.count += 1
        if task.expected is None:
            bucket.unknown += 1
        else:
            bucket.known += task.expected

    def take(self, need: int, module: str | None, limit: float | None = None) -> Task:
        """The longest test of a need, one of `module` if several are about as long; at most `limit` seconds long."""
        bucket = self._buckets[need]
        number = self._pick(bucket, limit)
        level = bucket.levels[number]
        name = module if module in level.modules else next(reversed(level.modules))
        assert name is not None
        tasks = level.modules[name]
        task = tasks.popleft()
        if not tasks:
            del level.modules[name]
        level.count -= 1
        if not level.count:
            bucket.order.remove(number)
            level.peak = 0.0
        bucket.count -= 1
        self.count -= 1
        if task.expected is None:
            bucket.unknown -= 1
        else:
            bucket.known -= task.expected
        return task

    def peek(self, need: int, module: str | None) -> int | None:
        """The test that :meth:`take` would give next."""
        bucket = self._buckets[need]
        if not bucket.order:
            return None
        modules = bucket.levels[bucket.order[-1]].modules
        name = module if module in modules else next(reversed(modules))
        assert name is not None
        return modules[name][0].index

    def _pick(self, bucket: _Bucket, limit: float | None) -> int:
        if limit is not None:
            for number in reversed(bucket.order):
                if bucket.levels[number].peak <= limit:
                    return number
        return bucket.order[-1]

    def saw(self, index: int, seconds: float) -> None:
        """A test has taken so long."""
        task = self.tasks[index]
        if task.expected is None:
            bucket = self._buckets[task.need]
            bucket.seen, bucket.seconds = bucket.seen + 1, bucket.seconds + seconds
            bucket.peak = max(bucket.peak, seconds)
            self._seen, self._seconds = self._seen + 1, self._seconds + seconds

    def expected(self, task: Task) -> float:
        """Seconds that a test is going to take, as far as one can tell."""
        return self._unknown(self._buckets[task.need]) if task.expected is None else task.expected

    def is_sure(self, task: Task) -> bool:
        """Whether something is known of how long tests like this one take."""
        return task.expected is not None or self._buckets[task.need].seen > 0

    def _unknown(self, bucket: _Bucket) -> float:
        if bucket.seen:
            return bucket.seconds / bucket.seen
        return self._seconds / self._seen if self._seen else self._guess

    def offers(self) -> list[Offer]:
        """What may start next: one offer a need."""
        found = []
        surprises = any(bucket.peak > RISKY * bucket.seconds / bucket.seen for bucket in self._buckets if bucket.seen)
        for key, bucket in enumerate(self._buckets):
            if bucket.count:
                unknown = self._unknown(bucket)
                times = [bucket.levels[bucket.order[at]].peak for at in (-1, 0)]
                if bucket.unknown:
                    times = [max(times[0], unknown), min(times[1], unknown)] if bucket.known else [unknown, unknown]
                need = bucket.need
                risky = surprises and 2 * bucket.unknown > bucket.count
                found.append(Offer(key, need.request, need.size, need.devices, times[0], times[1], risky))
        return found

    def totals(self) -> list[tuple[Need, float]]:
        """The seconds that remain of each need."""
        return [
            (bucket.need, bucket.known + bucket.unknown * self._unknown(bucket))
            for bucket in self._buckets
            if bucket.count
        ]

    def need(self, key: int) -> Need:
        """The need of a number."""
        return self._buckets[key].need
