"""The backlog: tests that have not been started, sorted by need and expected time. No operation visits all of them."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from pytest_accel.features.order.plan import Need, Offer

GUESS = 1.0
"""Expected seconds of a test if no time at all is known, neither remembered nor from this session."""
RISKY = 3.0
"""Tests without a remembered time are risky if one of them took more than this factor times the average of its need."""
_SHORT = 0.1
"""Tests shorter than this many seconds count as equally long."""
_STEP = 1.2
"""Longer tests are sorted into levels of about equal length: from one level to the next, times grow by this factor."""


@dataclass(frozen=True, slots=True)
class Task:
    """One test."""

    index: int
    """Its number in the collection."""
    need: int
    """The number of its need."""
    module: str
    expected: float | None = None
    """Expected seconds, from earlier sessions; None if none are remembered."""


@dataclass(slots=True)
class _Level:
    """Tests with the same need and about the same expected time, by module."""

    peak: float = 0.0
    """Longest expected time that was added, in seconds."""
    count: int = 0
    modules: dict[str, deque[Task]] = field(default_factory=dict)


@dataclass(slots=True)
class _Bucket:
    """The remaining tests of one need, and statistics of those that have run."""

    need: Need
    levels: dict[int, _Level] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    """Numbers of the levels that contain tests, ascending."""
    count: int = 0
    known: float = 0.0
    """Sum of the expected seconds of the remaining tests with a remembered time."""
    unknown: int = 0
    """Number of remaining tests without a remembered time."""
    seen: int = 0
    """Number of tests without a remembered time that have run in this session."""
    seconds: float = 0.0
    """Sum of the seconds that these have taken."""
    peak: float = 0.0
    """The longest of these times, in seconds."""


class Backlog:
    """The remaining tests, owned by the scheduler. After construction, the cost of a method is constant."""

    def __init__(self, needs: list[Need], tasks: list[Task]) -> None:
        self.needs = needs
        self.tasks = tasks
        self.count = 0
        self._buckets = [_Bucket(need) for need in needs]
        times = [task.expected for task in tasks if task.expected is not None]
        self._guess = median(times) if times else GUESS
        self._seen, self._seconds = 0, 0.0
        for task in tasks:
            self.add(task.index)

    def add(self, index: int) -> None:
        """Add a test that is to be run (again)."""
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
        """Remove and return the longest test of a need; of several about equally long ones, one of `module`.

        With a `limit`, the longest of at most that many seconds is taken, if there is one.
        """
        bucket = self._buckets[need]
        number = self._choose_level(bucket, limit)
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
        """Return the index of the test that :meth:`take` would return without a limit, or None."""
        bucket = self._buckets[need]
        if not bucket.order:
            return None
        modules = bucket.levels[bucket.order[-1]].modules
        name = module if module in modules else next(reversed(modules))
        assert name is not None
        return modules[name][0].index

    def _choose_level(self, bucket: _Bucket, limit: float | None) -> int:
        if limit is not None:
            for number in reversed(bucket.order):
                if bucket.levels[number].peak <= limit:
                    return number
        return bucket.order[-1]

    def record(self, index: int, seconds: float) -> None:
        """Record the seconds that a test has taken in this session."""
        task = self.tasks[index]
        if task.expected is None:
            bucket = self._buckets[task.need]
            bucket.seen, bucket.seconds = bucket.seen + 1, bucket.seconds + seconds
            bucket.peak = max(bucket.peak, seconds)
            self._seen, self._seconds = self._seen + 1, self._seconds + seconds

    def expected(self, task: Task) -> float:
        """Return the seconds that a test is expected to take."""
        return self._unknown_time(self._buckets[task.need]) if task.expected is None else task.expected

    def has_estimate(self, task: Task) -> bool:
        """Return True if the time of this test is remembered, or a test of the same need has run in this session."""
        return task.expected is not None or self._buckets[task.need].seen > 0

    def _unknown_time(self, bucket: _Bucket) -> float:
        if bucket.seen:
            return bucket.seconds / bucket.seen
        return self._seconds / self._seen if self._seen else self._guess

    def offers(self) -> list[Offer]:
        """Return one offer for each need that has remaining tests."""
        found = []
        has_risky = any(bucket.peak > RISKY * bucket.seconds / bucket.seen for bucket in self._buckets if bucket.seen)
        for key, bucket in enumerate(self._buckets):
            if bucket.count:
                unknown = self._unknown_time(bucket)
                times = [bucket.levels[bucket.order[at]].peak for at in (-1, 0)]
                if bucket.unknown:
                    times = [max(times[0], unknown), min(times[1], unknown)] if bucket.known else [unknown, unknown]
                risky = has_risky and 2 * bucket.unknown > bucket.count
                found.append(Offer(key, bucket.need, times[0], times[1], risky))
        return found

    def totals(self) -> list[tuple[Need, float]]:
        """Return each need that has remaining tests, with the sum of their expected seconds."""
        return [
            (bucket.need, bucket.known + bucket.unknown * self._unknown_time(bucket))
            for bucket in self._buckets
            if bucket.count
        ]

    def need(self, key: int) -> Need:
        """Return the need with the number `key`."""
        return self._buckets[key].need
