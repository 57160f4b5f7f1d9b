"""The division of the tests into parts of about the same time, for ``--accel-shard``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import pytest

from pytest_accel.driver.item_plan import ItemPlan
from pytest_accel.features.order.stored_durations import recall
from pytest_accel.features.order.tasks import Planned, Task, add_load, missing, need_of, seconds_of, size, tasks_of

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession


def skip_reason(item: pytest.Item, plan: ItemPlan | None) -> str | None:
    """Return the reason why a test is certain to be skipped; None if it may run."""
    return missing(item, plan) or ("marked skip" if any(item.iter_markers("skip")) else None)


def divide(session: AccelSession, planned: Planned, parts: int, workers: int) -> list[list[pytest.Item]]:
    """Divide tests into `parts` parts, for jobs that run `workers` tests at the same time. See `partition`.

    Only the times in the file of ``--accel-durations`` count: those in pytest's cache differ from job to job. The tests
    that are certain to be skipped are divided, too.
    """
    stored = {} if session.settings.durations is None else recall(session.config)
    needs = [need_of(item, plan, session.machine) for item, plan in planned]
    tasks = tasks_of([item.nodeid for item, _ in planned], needs, stored)
    for number, one in enumerate(planned):
        if skip_reason(*one) is not None:
            tasks[number] = Task(one[0].nodeid, seconds=0.0)
    found = partition(tasks, [_together(item) for item, _ in planned], parts, workers)
    return [[planned[index][0] for index in indices] for indices in found]


def _together(item: pytest.Item) -> str:
    """Return a text that is the same for tests that must run in one job; empty if `item` can run in any.

    Tests of pytest-dependency depend on others of their module; those of an ``xdist_group`` share what they set up.
    """
    if item.get_closest_marker("dependency") is not None:
        return item.nodeid.partition("::")[0]
    group = item.get_closest_marker("xdist_group")
    return "" if group is None else f"xdist_group {group.args} {group.kwargs}"


_ALLOWED_EXCESS = 0.02
"""Modules stay whole if the slowest part then exceeds the mean of all parts by at most this fraction."""


def partition(tasks: Sequence[Task], together: Sequence[str], parts: int, workers: int) -> list[list[int]]:
    """Return the indices of the `tasks` of each of `parts` parts, which are to end together, in ascending order.

    Bundles of tests, the longest first, go to the part whose time they increase to the least. A module stays in one
    part if that costs little, because its imports and fixtures are then needed in one job only. The result depends on
    the node ids, times and needs alone, so every job computes the same.

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
