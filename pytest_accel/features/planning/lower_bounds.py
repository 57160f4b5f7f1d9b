"""Lower bounds of the time that a set of tests takes, whatever their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request


def suite_lower_bound(tests: Sequence[tuple[Request | None, float]], slots: int) -> float:
    """Return a lower bound of the seconds for `tests` (requests with seconds), for any order and number of workers.

    `slots` is the number of CPU slots. Tests that can run on some of the devices only are also bounded by these alone.
    """
    bounds = [max((seconds for _, seconds in tests), default=0.0)]
    on_slots = [(float(request.slots), seconds) for request, seconds in tests if request is not None and request.slots]
    if on_slots:
        bounds.append(lower_bound(on_slots, slots, math.inf))
    on_devices = [
        (frozenset(request.candidates), request.count * min(request.parts, default=WHOLE) / WHOLE, seconds)
        for request, seconds in tests
        if request is not None and request.count
    ]
    for some in {names for names, _, _ in on_devices}:
        within = [(count, seconds) for names, count, seconds in on_devices if names <= some]
        bounds.append(lower_bound(within, len(some), math.inf))
    return max(bounds)


def lower_bound(tests: Iterable[tuple[float, float]], devices: int, workers: float) -> float:
    """Return a lower bound of the seconds for `tests`, each a number of devices (parts as fractions) and seconds.

    The bound is the maximum of: the longest test; the sum of all times, divided by the number of workers; and, for
    several measures of a test's size, the sum of size times seconds. Under each measure, the sizes of tests that run at
    the same time add up to at most 1. The measures are the dual feasible functions of Fekete and Schepers ("New classes
    of fast lower bounds for bin packing problems", 2001): under u_k, a test of which only k fit at the same time has
    the size 1/k.
    """
    longest = 0.0
    totals: dict[float, float] = {}
    for count, seconds in tests:
        longest = max(longest, seconds)
        totals[count] = totals.get(count, 0.0) + seconds
    bounds = [longest, sum(totals.values()) / workers]
    for measure in measures(devices):
        bounds.append(sum(measure(count / devices) * seconds for count, seconds in totals.items()))
    return max(bounds)


def measures(devices: int) -> Iterator[Callable[[float], float]]:
    """Yield the measures of a test's size, each a function of the fraction of the `devices` that the test takes."""
    for pieces in range(devices + 1):
        yield partial(_measure, pieces=pieces)


def _measure(size: float, pieces: int) -> float:
    """Return u_k(size) of Fekete and Schepers for k = `pieces`; the size itself if `pieces` is 0."""
    scaled = size * (pieces + 1)
    if pieces == 0 or abs(scaled - round(scaled)) < 1e-9:
        return size
    return int(scaled) / pieces
