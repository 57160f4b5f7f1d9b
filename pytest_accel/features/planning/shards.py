"""Partition of a suite into parts, one for each of several jobs on equal machines that are to end together. Pure.

The time of a part is estimated by lower bounds, as in `lower_bounds`: the time of the workers, that of the CPU slots,
and that of each group of devices under several measures. Each of these is a sum over the tests. In addition, the
tests that take all devices of a group cannot run beside the longest of the others. Bundles of tests, those with the
greatest load first, go to the part whose time they increase to the least.

A module stays in one part if that costs little, because its imports and fixtures are then needed in one job only; else
a class does. The result depends on the node ids, times and requests alone, so every job computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pytest_accel.features.planning.forecast import measures
from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request

_ALLOWED_EXCESS = 0.02
"""Modules and classes stay whole if the slowest part then exceeds the mean of all parts by at most this fraction."""
_SINGLE = 2
"""The level at which each test is a bundle of its own; at level 0 a module is one, at level 1 a class."""


@dataclass(frozen=True, slots=True)
class _Load:
    """The seconds that a set of tests adds to a part."""

    sums: tuple[float, ...]
    """Seconds of each resource."""
    alone: tuple[float, ...]
    """Seconds of the tests that take all devices of each group."""
    longest: tuple[float, ...]
    """Seconds of the longest of the other tests of each group."""

    @property
    def time(self) -> float:
        """Lower bound of the seconds for the tests."""
        return max((*self.sums, *map(sum, zip(self.alone, self.longest, strict=True))), default=0.0)

    @classmethod
    def of(cls, loads: Iterable[_Load]) -> _Load:
        """Return the load of the tests of all `loads`, which are not empty."""
        sums, alone, longest = zip(*((load.sums, load.alone, load.longest) for load in loads), strict=True)
        return cls(_add(sums), _add(alone), tuple(map(max, zip(*longest, strict=True))))


def _add(many: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*many, strict=True)))


@dataclass(frozen=True, slots=True)
class SplitTest:
    """A test of the suite."""

    nodeid: str
    seconds: float
    """Expected seconds; 0 for a test that will be skipped."""
    request: Request | None = None
    """Devices or CPU slots that the test takes; None: only a worker."""
    together: str = ""
    """Tests with the same text stay in one part; empty for a test that may be in any part."""


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Tests that are put into the same part."""

    name: str
    tests: tuple[int, ...]
    load: _Load


def partition(tests: Sequence[SplitTest], parts: int, workers: int, slots: int, *, timed: bool) -> list[list[int]]:
    """Return the indices of the `tests` of each of `parts` parts, in ascending order.

    `workers` is the number of tests that a job can run at the same time, `slots` the number of its CPU slots. `timed`
    is False if the seconds are guesses: single tests are then distributed by their number and size, since a part with
    several whole modules could take much longer than others. Tests with the same node id are in the same part.
    """
    order = sorted(range(len(tests)), key=lambda index: tests[index].nodeid)  # The order may differ between jobs.
    loads = _loads(tests, workers, slots)
    best: list[list[_Bundle]] = [[] for _ in range(parts)]
    least = math.inf
    for level in range(0 if timed else _SINGLE, _SINGLE + 1):
        found = _distribute(_bundles(tests, order, loads, level), parts)
        excess = _excess(found)
        if excess < least:
            best, least = found, excess
        if least <= _ALLOWED_EXCESS:
            break
    return [sorted(index for bundle in part for index in bundle.tests) for part in best]


def _loads(tests: Sequence[SplitTest], workers: int, slots: int) -> list[_Load]:
    """Return the load of each test."""
    groups = {frozenset(test.request.candidates) for test in tests if test.request is not None and test.request.count}
    sizes = [_size_in(names) for names in sorted(groups, key=sorted)]
    resources = [_workers(workers), _slots(slots)]
    for names, size in zip(sorted(groups, key=sorted), sizes, strict=True):
        resources += [_measured(size, measure) for measure in measures(len(names))]
    return [
        _Load(
            tuple(resource(test) * test.seconds for resource in resources),
            tuple(test.seconds if size(test) == 1 else 0.0 for size in sizes),
            tuple(test.seconds if 0 < size(test) < 1 else 0.0 for size in sizes),
        )
        for test in tests
    ]


_Resource = Callable[[SplitTest], float]
"""A function that returns the fraction of a resource that a test takes."""


def _workers(workers: int) -> _Resource:
    return lambda test: 1 / workers


def _slots(slots: int) -> _Resource:
    return lambda test: test.request.slots / slots if test.request is not None and test.request.slots else 0.0


def _size_in(names: frozenset[str]) -> _Resource:
    """Return the function for the devices `names`, which counts only tests that can run on no others."""

    def size(test: SplitTest) -> float:
        request = test.request
        if request is None or not request.count or not names.issuperset(request.candidates):
            return 0.0
        return request.count * min(request.parts, default=WHOLE) / WHOLE / len(names)

    return size


def _measured(size: _Resource, measure: Callable[[float], float]) -> _Resource:
    return lambda test: measure(size(test))


def _bundles(tests: Sequence[SplitTest], order: Sequence[int], loads: Sequence[_Load], level: int) -> list[_Bundle]:
    members: dict[str, list[int]] = {}
    for index in order:
        members.setdefault(_bundle_name(tests[index], level), []).append(index)
    return [
        _Bundle(name, tuple(indices), _Load.of(loads[index] for index in indices)) for name, indices in members.items()
    ]


def _bundle_name(test: SplitTest, level: int) -> str:
    if test.together:
        return test.together
    module, *names = test.nodeid.split("::")
    return test.nodeid if level == _SINGLE else "::".join((module, *(names[:-1] if level else ())))


def _distribute(bundles: Sequence[_Bundle], parts: int) -> list[list[_Bundle]]:
    """Return the bundles of each part."""
    found: list[list[_Bundle]] = [[] for _ in range(parts)]
    totals: list[_Load | None] = [None] * parts
    for bundle in sorted(bundles, key=lambda bundle: (-bundle.load.time, bundle.name)):
        after = [bundle.load if total is None else _Load.of((total, bundle.load)) for total in totals]
        _, _, _, part = min((load.time, sum(load.sums), len(found[part]), part) for part, load in enumerate(after))
        totals[part] = after[part]
        found[part].append(bundle)
    return found


def _excess(found: Sequence[Sequence[_Bundle]]) -> float:
    """Return by which fraction the estimated time of the slowest part exceeds the mean."""
    times = [_Load.of(bundle.load for bundle in part).time if part else 0.0 for part in found]
    mean = sum(times) / len(times)
    return max(times) / mean - 1 if mean else 0.0
