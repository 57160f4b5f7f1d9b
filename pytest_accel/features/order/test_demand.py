"""The demand of a session's tests for devices and resources, as an xdist worker sends it, and the tasks made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest

from pytest_accel.core.needs import DriverLeases
from pytest_accel.core.stash_keys import DRIVER_LEASES, MARKED
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import ItemPlan
from pytest_accel.features.order.rule import Need, Task
from pytest_accel.features.order.stored_durations import NO_DEVICE, Entries, expected
from pytest_accel.hardware.hypothetical_machine import without_figures
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import shortfall
from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.allocator import request_for
from pytest_accel.leases.policy import Request

CHANNEL = "accel_order"
"""Key of xdist's `workerinput` for the channel through which a worker sends the `Demand` of its tests."""
Wanted = tuple[WorldKey, ...]
"""The needs of a test: the key of its world, if it has one, and those of its `DriverLeases`."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The needs of a collection of tests."""

    wanted: tuple[Wanted, ...]
    """The different needs; an empty one is that of a test that needs only a worker, or cannot run."""
    tests: tuple[int, ...]
    """The index of each test's need."""

    @classmethod
    def of(cls, tests: Iterable[Wanted]) -> Demand:
        """Make a demand from what each test of the collection needs.

        The keys lose their environment variables: no need depends on them, and messages cannot carry all characters.
        """
        numbers: dict[Wanted, int] = {}
        found = tuple(numbers.setdefault(one, len(numbers)) for one in tests)
        return cls(tuple(tuple(replace(key, env=()) for key in keys) for keys in numbers), found)

    def tasks(self, collection: Sequence[str], stored: Entries, machine: Machine) -> list[Task]:
        """Return the tests of a `collection` of node ids on a machine, with their `stored` times."""
        needs = [_need(keys, machine) for keys in self.wanted]
        kinds = [keys[0].used_kind if keys and keys[0].ranks else NO_DEVICE for keys in self.wanted]
        return [
            Task(nodeid, needs[number], expected(stored.get(nodeid, {}), kinds[number]))
            for nodeid, number in zip(collection, self.tests, strict=True)
        ]


def plan_of(item: pytest.Item) -> ItemPlan | None:
    """Return the plan of `item`, after the items of the session have been redirected; None if it has no marks."""
    marked = item.stash.get(MARKED, None)
    return None if marked is None else marked.plan


def missing(item: pytest.Item, plan: ItemPlan | None) -> str | None:
    """Return why `item` cannot run, whose marks have this `plan` (None: it has none); None if it can."""
    return item.stash.get(DRIVER_LEASES, DriverLeases(())).missing if plan is None else plan.missing


def wanted(item: pytest.Item, plan: ItemPlan | None) -> Wanted:
    """Return what `item` needs; nothing if it cannot run."""
    keys = () if plan is None else (plan.key,)
    return () if missing(item, plan) else (*keys, *item.stash.get(DRIVER_LEASES, DriverLeases(())).keys)


def _need(keys: Wanted, machine: Machine) -> Need:
    requests: list[Request] = []
    largest: tuple[float, tuple[str, ...]] = (0.0, ())
    for key in keys:
        if key.need is None:
            requests.append(Request(0, (), 0, slots=min(key.ranks, machine.slots)))
            largest = max(largest, (requests[-1].slots / max(1, machine.slots), ()))
            continue
        inventory = machine.of(key.kind)
        # The memory and the capability of a cluster's devices are unknown. A test that needs more than all of the
        # cluster waits in a worker until it has grown.
        needs = key.need, without_figures(key.need)
        need = next((one for one in needs if shortfall(one, inventory) is None), None)
        if need is not None:
            requests.append(request := request_for(0, need, inventory))
            parts = request.count * max(request.parts, default=WHOLE) / WHOLE
            largest = max(largest, (min(1.0, parts / max(1, len(request.candidates))), request.candidates))
    return Need(tuple(requests), *largest)
