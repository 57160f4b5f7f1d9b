"""Tests as the order, the plan and the division into parts see them: their needs and their expected times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import pytest

from pytest_accel.core.stash_keys import DRIVER_LEASES, MARKED
from pytest_accel.core.world_key import DriverLeases
from pytest_accel.driver.item_plan import ItemPlan
from pytest_accel.features.order.stored_durations import Entries
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.shares import fraction

CHANNEL = "accel_order"
"""Key of the channel to the controller in the `workerinput` of an xdist worker."""
SLOTS = "CPU slot"
"""The kind of ranks that run on the CPU."""
Need = tuple[tuple[str, int, float], ...]
"""The needs of a test, for its world and each lease of its driver: the kind, the number, and the part of all devices.
Only the pool knows which devices are free, and which fit a test."""
Planned = Sequence[tuple[pytest.Item, ItemPlan | None]]
"""Tests with their plans; None for tests without marks."""


class Task(NamedTuple):
    """A test."""

    nodeid: str
    need: Need = ()
    seconds: float | None = None
    """Expected seconds, from earlier sessions; None if none are stored."""

    @property
    def module(self) -> str:
        return self.nodeid.partition("::")[0]


def planned(items: Iterable[pytest.Item]) -> Planned:
    """Return `items` with their plans, after the items of the session have been redirected."""
    found = [(item, item.stash.get(MARKED, None)) for item in items]
    return [(item, None if marked is None else marked.plan) for item, marked in found]


def missing(item: pytest.Item, plan: ItemPlan | None) -> str | None:
    """Return why `item` cannot run, or None. `plan` is the plan of its marks; None if it has none."""
    return item.stash.get(DRIVER_LEASES, DriverLeases(())).missing if plan is None else plan.missing


def need_of(item: pytest.Item, plan: ItemPlan | None, machine: Machine) -> Need:
    """Return what `item` takes of the machine, nothing if it cannot run.

    Tests of a cluster without devices do not wait for each other: it may add devices for all of them.
    """
    takes = []
    keys = (() if plan is None else (plan.key,)) + item.stash.get(DRIVER_LEASES, DriverLeases(())).keys
    for key in () if missing(item, plan) else keys:
        if key.need is None:
            takes.append((SLOTS, min(key.ranks, machine.slots), min(1.0, key.ranks / machine.slots)))
        else:
            need, devices = key.need, machine.of(key.kind).devices
            wanted = need.count * max((fraction(need.share, device) for device in devices), default=0.0)
            takes.append((key.kind, need.count, min(1.0, wanted / max(1, len(devices)))))
    return tuple(takes)


def tasks_of(collection: Sequence[str], needs: Sequence[Need], stored: Entries) -> list[Task]:
    """Return the tests of a `collection` of node ids with their needs and the medians of their `stored` times."""
    medians = {nodeid: median(seconds for _, seconds in pairs) for nodeid, pairs in stored.items() if pairs}
    return [Task(nodeid, need, medians.get(nodeid)) for nodeid, need in zip(collection, needs, strict=True)]


def seconds_of(tasks: Sequence[Task]) -> list[float]:
    """Return the seconds that each test is assumed to take; without a stored time, the median of the others, or 1."""
    guess = median([task.seconds for task in tasks if task.seconds is not None] or [1.0])
    return [guess if task.seconds is None else task.seconds for task in tasks]


def add_load(loads: defaultdict[object, float], need: Need, seconds: float, workers: int) -> None:
    """Add a test to the seconds for which tests take all `workers`, and all devices of each kind."""
    loads["workers"] += seconds / workers
    for kind, _, part in need:
        loads[kind] += part * seconds


def size(need: Need) -> float:
    """Return the largest part that a test takes of one kind."""
    return max((part for _, _, part in need), default=0.0)
