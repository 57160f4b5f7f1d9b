"""The demand of a session's tests for devices and resources, as an xdist worker sends it and the scheduler uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest

from pytest_accel.core.needs import DriverLeases
from pytest_accel.core.stash_keys import DRIVER_LEASES, MARKED
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import ItemPlan
from pytest_accel.features.order.backlog import Backlog, Task
from pytest_accel.features.order.plan import Need
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
    """The tests of a collection that need more than a worker, and what they need."""

    wanted: tuple[Wanted, ...]
    """The different needs."""
    tests: tuple[tuple[int, int], ...]
    """The index of each test in the collection, and the index of its need; tests that cannot run are left out."""

    @classmethod
    def of(cls, tests: Iterable[Wanted]) -> Demand:
        """Make a demand from what each test of the collection needs.

        The keys lose their environment variables: no need depends on them, and messages cannot carry all characters.
        """
        numbers: dict[Wanted, int] = {}
        found = [(index, numbers.setdefault(one, len(numbers))) for index, one in enumerate(tests) if one]
        return cls(tuple(tuple(replace(key, env=()) for key in keys) for keys in numbers), tuple(found))

    def needs(self, machine: Machine, slots: int) -> list[Need]:
        """Return the needs of the tests: first that of a test that needs only a worker, then the others."""
        return [Need(), *(_need(keys, machine, slots) for keys in self.wanted)]

    def kinds(self) -> list[str]:
        """Return the kind of device for each of the :meth:`needs`."""
        return [NO_DEVICE, *(keys[0].used_kind if keys[0].ranks else NO_DEVICE for keys in self.wanted)]

    def requests(self, count: int, machine: Machine, slots: int) -> list[tuple[Request, ...]]:
        """Return the requests of each of the `count` tests of the collection, that of its world first."""
        needs, need_of = self.needs(machine, slots), self._need_of()
        return [needs[need_of.get(index, 0)].requests for index in range(count)]

    def kinds_of_tests(self, count: int) -> list[str]:
        """Return the kind of device that each of the `count` tests of the collection uses."""
        kinds, need_of = self.kinds(), self._need_of()
        return [kinds[need_of.get(index, 0)] for index in range(count)]

    def backlog(
        self, collection: Sequence[str], machine: Machine, slots: int, expected: Sequence[float | None]
    ) -> Backlog:
        """Return a backlog of all tests of `collection` (node ids), with their `expected` seconds if known."""
        need_of = self._need_of()
        tasks = [
            Task(index, need_of.get(index, 0), nodeid.partition("::")[0], expected[index])
            for index, nodeid in enumerate(collection)
        ]
        return Backlog(self.needs(machine, slots), tasks)

    def _need_of(self) -> dict[int, int]:
        return {index: 1 + key for index, key in self.tests}

    def devices(self, machine: Machine) -> dict[str, int]:
        """Return all devices that a test may use, each with its number of parts."""
        kinds = dict.fromkeys(key.kind for keys in self.wanted for key in keys if key.need is not None)
        return {device.id: WHOLE for kind in kinds for device in machine.of(kind).devices}


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
    size = devices = 0.0
    for key in keys:
        if key.need is None:
            requests.append(Request(0, (), 0, slots=min(key.ranks, slots)))
            continue
        inventory = machine.of(key.kind)
        # The memory and the capability of a cluster's devices are unknown. A test that needs more than all of the
        # cluster waits in a worker until it has grown.
        needs = key.need, without_figures(key.need)
        need = next((one for one in needs if shortfall(one, inventory) is None), None)
        if need is not None:
            request = request_for(0, need, inventory)
            requests.append(request)
            size = max(size, min(1.0, _devices(request) / max(1, len(request.candidates))))
            devices += _devices(request) if key.ranks else 0.0
    return Need(tuple(requests), size, devices)


def _devices(request: Request) -> float:
    """Return the number of devices that a request takes; parts count as fractions, the largest if candidates differ."""
    parts: Sequence[int] = request.parts or (WHOLE,)
    return request.count * max(parts, default=WHOLE) / WHOLE
