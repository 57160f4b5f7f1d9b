"""How long tests must take together at the least, whatever their order."""

from __future__ import annotations

from collections.abc import Sequence


def lower_bound(tests: Sequence[tuple[float, float]], devices: int, workers: int) -> float:
    """Seconds that no order of `tests` can beat. Each is a number of devices (parts count as such) and seconds.

    The most of: the longest test; all of them over the workers; and for several measures of a test's size, under which
    what runs at the same time never comes to more than 1, the sum of size by time. These are the dual feasible
    functions of Fekete and Schepers ("New classes of fast lower bounds for bin packing problems", 2001): by u_k, tests
    of which only k fit at the same time count as 1/k of the machine.
    """
    bounds = [max((seconds for _, seconds in tests), default=0.0), sum(seconds for _, seconds in tests) / workers]
    for pieces in range(devices + 1):
        bounds.append(sum(_measure(count / devices, pieces) * seconds for count, seconds in tests))
    return max(bounds)


def _measure(size: float, pieces: int) -> float:
    """u_k of Fekete and Schepers; for no pieces the size itself."""
    scaled = size * (pieces + 1)
    if pieces == 0 or abs(scaled - round(scaled)) < 1e-9:
        return size
    return int(scaled) / pieces
