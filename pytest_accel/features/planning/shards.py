"""Partition of a suite into parts, one for each of several jobs on equal machines that are to end together. Pure.

Bundles of tests, the longest first, go to the part whose time they increase to the least. A module stays in one part if
that costs little, because its imports and fixtures are then needed in one job only. The result depends on the node ids,
times and needs alone, so every job computes the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from pytest_accel.features.order.rule import Need

_ALLOWED_EXCESS = 0.02
"""Modules stay whole if the slowest part then exceeds the mean of all parts by at most this fraction."""
_ONLY_A_WORKER = Need()


@dataclass(frozen=True, slots=True)
class SplitTest:
    """A test of the suite."""

    nodeid: str
    seconds: float
    """Expected seconds; 0 for a test that will be skipped."""
    need: Need = _ONLY_A_WORKER
    together: str = ""
    """Tests with the same text stay in one part; empty for a test that may be in any part."""


def partition(tests: Sequence[SplitTest], parts: int, workers: int, *, timed: bool) -> list[list[int]]:
    """Return the indices of the `tests` of each of `parts` parts, in ascending order.

    `workers` is the number of tests that a job can run at the same time. `timed` is False if the seconds are guesses:
    single tests are then distributed by their number and size, since a part with several whole modules could take much
    longer than others. Tests with the same node id are in the same part.
    """
    for whole_modules in (True, False) if timed else (False,):
        bundles: dict[str, list[int]] = {}
        for index in sorted(range(len(tests)), key=lambda index: tests[index].nodeid):  # Jobs collect in other orders.
            test = tests[index]
            name = test.nodeid.partition("::")[0] if whole_modules else test.nodeid
            bundles.setdefault(test.together or name, []).append(index)
        found: list[list[int]] = [[] for _ in range(parts)]
        loads: list[dict[object, float]] = [{} for _ in range(parts)]

        def rank(bundle: list[int]) -> tuple[float, int, str]:
            # The order of names would give each part the same one of several equal test functions.
            name = tests[bundle[0]].nodeid
            return (
                -_time(_load({}, tests, bundle, workers, timed=timed)),
                crc32(name.encode(errors="surrogatepass")),
                name,
            )

        for bundle in sorted(bundles.values(), key=rank):
            after = [_load(load, tests, bundle, workers, timed=timed) for load in loads]
            part = min(range(parts), key=lambda part: (_time(after[part]), sum(after[part].values()), len(found[part])))
            loads[part] = after[part]
            found[part] += bundle
        times = [_time(load) for load in loads]
        if max(times) * parts <= sum(times) * (1 + _ALLOWED_EXCESS):
            break
    return [sorted(part) for part in found]


def _load(
    before: Mapping[object, float], tests: Sequence[SplitTest], bundle: Sequence[int], workers: int, *, timed: bool
) -> dict[object, float]:
    """Return the load `before` with that of a bundle added: the seconds for which each resource is taken.

    Tests that take all of a group of devices (`alone`) cannot run beside the longest of the others.
    """
    load = defaultdict(float, before)
    for test in (tests[index] for index in bundle):
        load["workers"] += test.seconds / workers
        load[test.need.candidates] += test.need.size * test.seconds
        if test.need.size == 1:
            load["alone"] += test.seconds
        elif test.need.requests and timed:
            load["longest"] = max(load["longest"], test.seconds)
    return load


def _time(load: Mapping[object, float]) -> float:
    """Return a lower bound of the seconds that the tests of a part take."""
    return max((*load.values(), load.get("alone", 0.0) + load.get("longest", 0.0)))
