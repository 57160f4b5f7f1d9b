"""The demand of a session's tests for devices and resources, as an xdist worker sends it and the rule uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest

from pytest_accel.core.needs import DriverLeases
from pytest_accel.core.stash_keys import DRIVER_LEASES, MARKED
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import ItemPlan
from pytest_accel.features.order.rule import Need, RunOrder, Task
from pytest_accel.features.order.stored_durations import NO_DEVICE
from pytest_accel.hardware.hypothetical_machine import without_figures
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import shortfall
from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.allocator import request_for
from pytest_accel.leases.policy import Request

Wanted = tuple[WorldKey, ...]
"""The needs of a test: the key of its world, if it has one, and those of its `DriverLeases`."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The needs of a collection of tests."""

    wanted: tuple[Wanted, ...]
    """The different needs. The first is that of a test that needs only a worker, or cannot run."""
    tests: tuple[int, ...]
    """The index of each test's need."""

    @classmethod
    def of(cls, tests: Iterable[Wanted]) -> Demand:
        """Make a demand from what each test of the collection needs.

        The keys lose their environment variables: no need depends on them, and messages cannot carry all characters.
        """
        numbers: dict[Wanted, int] = {(): 0}
        found = tuple(numbers.setdefault(one, len(numbers)) for one in tests)
        return cls(tuple(tuple(replace(key, env=()) for key in keys) for keys in numbers), found)

    def needs(self, machine: Machine, slots: int) -> list[Need]:
        """Return the different needs as the rule sees them."""
        return [_need(keys, machine, slots) for keys in self.wanted]

    def kinds_of_tests(self) -> list[str]:
        """Return the kind of device that each test uses."""
        kinds = [keys[0].used_kind if keys and keys[0].ranks else NO_DEVICE for keys in self.wanted]
        return [kinds[number] for number in self.tests]

    def order(
        self, collection: Sequence[str], machine: Machine, slots: int, stored: Sequence[float | None]
    ) -> RunOrder:
        """Return the order of `collection` (node ids) on a machine; `stored` has the expected seconds of each test."""
        modules = [nodeid.partition("::")[0] for nodeid in collection]
        return RunOrder(self.needs(machine, slots), list(map(Task, self.tests, modules, stored)), slots)


def wanted(item: pytest.Item, plan: ItemPlan | None) -> Wanted:
    """Return what `item` needs, whose marks have this `plan` (None: it has none); nothing if it cannot run."""
    leases = item.stash.get(DRIVER_LEASES, DriverLeases(()))
    if plan is None:
        return leases.keys if leases.missing is None else ()
    return (plan.key, *leases.keys) if plan.missing is None else ()


def wanted_by(item: pytest.Item) -> Wanted:
    """Return what `item` needs, after the items of the session have been redirected; nothing if it cannot run."""
    marked = item.stash.get(MARKED, None)
    return wanted(item, None if marked is None else marked.plan)


def _need(keys: Wanted, machine: Machine, slots: int) -> Need:
    requests: list[Request] = []
    largest: tuple[float, tuple[str, ...]] = (0.0, ())
    for key in keys:
        if key.need is None:
            requests.append(Request(0, (), 0, slots=min(key.ranks, slots)))
            largest = max(largest, (requests[-1].slots / max(1, slots), ()))
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
