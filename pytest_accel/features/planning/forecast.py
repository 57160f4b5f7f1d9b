"""The forecast of a session: the rule of the order of tests under a virtual clock. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from pytest_accel.features.order.scheduler import RunOrder
from pytest_accel.features.order.tasks import Task, seconds_of


def makespan(tasks: Sequence[Task], workers: int) -> float:
    """Return the seconds that all tests take in a simulated session with ``-n workers``."""
    order, seconds, now = RunOrder(tasks, workers), seconds_of(tasks), 0.0
    ends: list[tuple[float, int]] = []
    order.idle += reversed(range(workers))
    while True:
        for worker, index in order.started():
            heapq.heappush(ends, (now + seconds[index], worker))
        if not ends:
            return now
        now, worker = heapq.heappop(ends)
        order.end(worker)
        order.idle.append(worker)
