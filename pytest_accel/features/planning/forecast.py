"""Forecasts of a session: the rule of the order of tests under a virtual clock. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pytest_accel.features.order.rule import RunOrder, Task, guess


class Span(NamedTuple):
    """The simulated run of a test."""

    test: int
    """Index of the test."""
    worker: int
    begin: float
    """Seconds since the start of the session."""
    end: float
    devices: tuple[tuple[str, int], ...]
    """The devices that it held, each with the number of parts."""


def seconds_of(tasks: Sequence[Task]) -> list[float]:
    """Return the seconds that each test is assumed to take."""
    unknown = guess(tasks)
    return [unknown if task.seconds is None else task.seconds for task in tasks]


def unknown(tasks: Iterable[Task]) -> int:
    """Return the number of tests without any stored time."""
    return sum(task.seconds is None for task in tasks)


def simulate(tasks: Sequence[Task], slots: int, workers: int) -> list[Span]:
    """Return the simulated runs of all tests in a session with ``-n workers``, by their ends."""
    order, seconds = RunOrder(tasks, slots), seconds_of(tasks)
    now, idle = 0.0, list(reversed(range(workers)))
    events: list[tuple[float, int, list[int]]] = []
    spans: list[Span] = []
    while True:
        while idle and (tests := order.start(idle[-1], now, len(idle) - 1)):
            worker, begin = idle.pop(), now
            for index in tests:
                spans.append(Span(index, worker, begin, begin + seconds[index], order.holds(worker)))
                begin += seconds[index]
            heapq.heappush(events, (begin, worker, tests))
        if not events:
            return sorted(spans, key=lambda span: span.end)
        now, worker, tests = heapq.heappop(events)
        for index in tests:
            order.record(index, seconds[index])
        order.end(worker)
        idle.append(worker)


def critical_path(spans: Sequence[Span]) -> list[Span]:
    """Return the last test to end, preceded by the test that it waited for, and so on.

    If several tests end when a test begins, it has waited for one whose device it gets, else for its worker's.
    """
    path: list[Span] = []
    left = list(spans)
    while left:
        span = left.pop()
        path.insert(0, span)

        def rank(number: int, span: Span = span) -> tuple[bool, bool, int]:
            one = left[number]
            shares = not {name for name, _ in span.devices}.isdisjoint(name for name, _ in one.devices)
            return shares, one.worker == span.worker, number

        del left[1 + max((number for number, one in enumerate(left) if one.end == span.begin), key=rank, default=-1) :]
    return path
