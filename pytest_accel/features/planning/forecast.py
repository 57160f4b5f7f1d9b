"""Forecasts of a session: the rule of the order of tests under a virtual clock. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pytest_accel.features.order.scheduler import RunOrder
from pytest_accel.features.order.tasks import Task, seconds_of


class Span(NamedTuple):
    """The simulated run of a test."""

    test: int
    """Index of the test."""
    worker: int
    begin: float
    """Seconds since the start of the session."""
    end: float


def unknown(tasks: Iterable[Task]) -> int:
    """Return the number of tests without any stored time."""
    return sum(task.seconds is None for task in tasks)


def simulate(tasks: Sequence[Task], workers: int) -> list[Span]:
    """Return the simulated runs of all tests in a session with ``-n workers``, by their ends."""
    order, seconds = RunOrder(tasks, workers), seconds_of(tasks)
    now, spans = 0.0, []
    ends: list[tuple[float, int]] = []
    order.idle += reversed(range(workers))
    while True:
        for worker, index in order.started():
            spans.append(Span(index, worker, now, now + seconds[index]))
            heapq.heappush(ends, (spans[-1].end, worker))
        if not ends:
            return sorted(spans, key=lambda span: span.end)
        now, worker = heapq.heappop(ends)
        order.end(worker)
        order.idle.append(worker)


def critical_path(spans: Sequence[Span], tasks: Sequence[Task]) -> list[Span]:
    """Return the last test to end, preceded by the test that it waited for, and so on.

    If several tests end when a test begins, it has waited for one of the same kind of device, else for its worker's.
    """
    path: list[Span] = []
    left = list(spans)
    while left:
        span = left.pop()
        path.insert(0, span)

        def rank(number: int, span: Span = span) -> tuple[bool, bool, int]:
            one = left[number]
            kinds, others = ({kind for kind, _, _ in tasks[test].need} for test in (span.test, one.test))
            return not kinds.isdisjoint(others), one.worker == span.worker, number

        del left[1 + max((number for number, one in enumerate(left) if one.end == span.begin), key=rank, default=-1) :]
    return path
