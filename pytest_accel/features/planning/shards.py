"""Partition of a suite into parts, one for each of several jobs on equal machines that are to end together. Pure.

Bundles of tests, the longest first, go to the part whose time they increase to the least. A module stays in one part if
that costs little, because its imports and fixtures are then needed in one job only. The result depends on the node ids,
times and needs alone, so every job computes the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from zlib import crc32

from pytest_accel.features.order.tasks import Task, add_load, seconds_of, size

_ALLOWED_EXCESS = 0.02
"""Modules stay whole if the slowest part then exceeds the mean of all parts by at most this fraction."""


def partition(tasks: Sequence[Task], together: Sequence[str], parts: int, workers: int) -> list[list[int]]:
    """Return the indices of the `tasks` of each of `parts` parts, in ascending order.

    `workers` is the number of tests that a job can run at the same time. Tests with the same text in `together`, unless
    this is empty, or with the same node id are in one part. If most times are unknown, single tests are distributed by
    their number and size, since a part with several whole modules could take much longer than others.
    """
    seconds, timed = seconds_of(tasks), 2 * sum(task.seconds is None for task in tasks) <= len(tasks)

    def load(before: Mapping[object, float], bundle: Sequence[int]) -> dict[object, float]:
        """Return the load `before` with that of a bundle added: the seconds for which each resource is taken.

        Tests that take all of a group of devices (`alone`) cannot run beside the longest of the others.
        """
        after = defaultdict(float, before)
        for need, took in ((tasks[index].need, seconds[index]) for index in bundle):
            add_load(after, need, took, workers)
            if size(need) == 1:
                after["alone"] += took
            elif need and timed:
                after["longest"] = max(after["longest"], took)
        return after

    def rank(name: str) -> tuple[float, int, str]:
        # The order of names would give each part the same one of several equal test functions.
        bundle = bundles[name]
        return -_time(load({}, bundle)), crc32(name.encode(errors="surrogatepass")), name

    for whole_modules in (True, False) if timed else (False,):
        bundles: dict[str, list[int]] = {}
        for index in sorted(range(len(tasks)), key=lambda index: tasks[index].nodeid):  # Jobs collect in other orders.
            name = together[index] or (tasks[index].module if whole_modules else tasks[index].nodeid)
            bundles.setdefault(name, []).append(index)
        found: list[list[int]] = [[] for _ in range(parts)]
        loads: list[dict[object, float]] = [{} for _ in range(parts)]
        for name in sorted(bundles, key=rank):
            after = [load(one, bundles[name]) for one in loads]
            part = min(range(parts), key=lambda part: (_time(after[part]), sum(after[part].values()), len(found[part])))
            loads[part] = after[part]
            found[part] += bundles[name]
        times = [_time(one) for one in loads]
        if max(times) * parts <= sum(times) * (1 + _ALLOWED_EXCESS):
            break
    return [sorted(part) for part in found]


def _time(load: Mapping[object, float]) -> float:
    """Return a lower bound of the seconds that the tests of a part take."""
    return max((*load.values(), load.get("alone", 0.0) + load.get("longest", 0.0)))
