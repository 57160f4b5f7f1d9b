"""How long tests must take together at the least, whatever their order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request


def least(tests: Sequence[tuple[Request | None, float]], slots: int) -> float:
    """Seconds that no order and no number of workers can beat. Each test is what it takes, and for how long.

    `slots` are those of the CPU. What can run on some of the devices only is held to those as well.
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
    """Seconds that no order of `tests` can beat. Each is a number of devices (parts count as such) and seconds.

    The most of: the longest test; all of them over the workers; and for several measures of a test's size, under which
    what runs at the same time never comes to more than 1, the sum of size by time. These are the dual feasible
    functions of Fekete and Schepers ("New classes of fast lower bounds for bin packing problems", 2001): by u_k, tests
    of which only k fit at the same time count as 1/k of the machine.
    """
    longest = 0.0
    totals: dict[float, float] = {}
    for count, seconds in tests:
        longest = max(longest, seconds)
        totals[count] = totals.get(count, 0.0) + seconds
    bounds = [longest, sum(totals.values()) / workers]
    for pieces in range(devices + 1):
        bounds.append(sum(_measure(count / devices, pieces) * seconds for count, seconds in totals.items()))
    return max(bounds)


def _measure(size: float, pieces: int) -> float:
    """u_k of Fekete and Schepers; for no pieces the size itself."""
    scaled = size * (pieces + 1)
    if pieces == 0 or abs(scaled - round(scaled)) < 1e-9:
        return size
    return int(scaled) / pieces
