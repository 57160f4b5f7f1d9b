"""The demand of a session's tests for devices and resources, as an xdist worker sends it and the scheduler uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

import pytest

from pytest_accel.core.stash_keys import DRIVER_LEASES, MARKED
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.order.backlog import Backlog, Need, Task
from pytest_accel.features.order.stored_durations import NO_DEVICE
from pytest_accel.hardware.hypothetical_machine import without_figures
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import shortfall
from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.allocator import request_for
from pytest_accel.leases.policy import Request


@dataclass(frozen=True, slots=True)
class Demand:
    """The tests of a collection that need more than a worker, and what they need."""

    keys: tuple[WorldKey | None, ...]
    """The key of the world for each need; None for tests without a world."""
    leases: tuple[tuple[WorldKey, ...], ...]
    """The keys of `DriverLeases` for each need."""
    tests: tuple[tuple[int, int], ...]
    """The index of each test in the collection, and the index of its need; tests that cannot run are left out."""

    @classmethod
    def of(
        cls,
        wanted: Iterable[tuple[int, WorldKey]],
        leases: Mapping[int, tuple[WorldKey, ...]] = MappingProxyType({}),
    ) -> Demand:
        """Make a demand from the indices of tests and the keys of their worlds; `leases` has those of their drivers.

        The keys lose their environment variables: no need depends on them, and messages cannot carry all characters.
        """
        numbers: dict[tuple[WorldKey | None, tuple[WorldKey, ...]], int] = {}
        worlds = dict(wanted)
        tests = tuple(
            (index, numbers.setdefault((worlds.get(index), leases.get(index, ())), len(numbers)))
            for index in sorted(worlds.keys() | leases.keys())
        )
        keys = tuple(None if key is None else replace(key, env=()) for key, _ in numbers)
        return cls(keys, tuple(leased for _, leased in numbers), tests)

    def needs(self, machine: Machine, slots: int) -> list[Need]:
        """Return the needs of the tests: first that of a test that needs only a worker, then the others."""
        found = [Need()]
        for key, leased in zip(self.keys, self.leases, strict=True):
            world = Need() if key is None else _need(key, machine, slots)
            others = [_need(one, machine, slots) for one in leased]
            requests = tuple(other.request for other in others if other.request is not None)
            found.append(replace(world, size=max(one.size for one in (world, *others)), leases=requests))
        return found

    def kinds(self) -> list[str]:
        """Return the kind of device for each of the :meth:`needs`."""
        return [NO_DEVICE, *(NO_DEVICE if key is None else key.used_kind for key in self.keys)]

    def requests(self, count: int, machine: Machine, slots: int) -> list[tuple[Request, ...]]:
        """Return the requests of each of the `count` tests of the collection, that of its world first."""
        needs, need_of = self.needs(machine, slots), self._need_of()
        found = (needs[need_of.get(index, 0)] for index in range(count))
        return [need.leases if need.request is None else (need.request, *need.leases) for need in found]

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
        used = (key for key in (*self.keys, *chain(*self.leases)) if key is not None and key.need is not None)
        kinds = dict.fromkeys(key.kind for key in used)
        return {device.id: WHOLE for kind in kinds for device in machine.of(kind).devices}


def leases_of(items: Iterable[pytest.Item]) -> dict[int, tuple[WorldKey, ...]]:
    """Return the keys of the leases (`DriverLeases`) of those of `items` that take any, by their index."""
    found: dict[int, tuple[WorldKey, ...]] = {}
    for index, item in enumerate(items):
        if (needed := item.stash.get(DRIVER_LEASES, None)) is not None:
            marked = item.stash.get(MARKED, None)
            found[index] = tuple(key for key, _ in needed.beside(None if marked is None else marked.key))
    return {index: keys for index, keys in found.items() if keys}


def _need(key: WorldKey, machine: Machine, slots: int) -> Need:
    if key.need is None:
        return Need(Request(0, (), 0, slots=min(key.ranks, slots)))
    inventory = machine.of(key.kind)
    # The memory and the capability of a cluster's devices are unknown. A test that needs more than all of the cluster
    # waits in a worker until it has grown.
    needs = key.need, without_figures(key.need)
    need = next((one for one in needs if shortfall(one, inventory) is None), None)
    if need is None:
        return Need()
    request = request_for(0, need, inventory)
    devices = _devices(request)
    return Need(request, min(1.0, devices / max(1, len(request.candidates))), devices)


def _devices(request: Request) -> float:
    """Return the number of devices that a request takes; parts count as fractions, the largest if candidates differ."""
    parts: Sequence[int] = request.parts or (WHOLE,)
    return request.count * max(parts, default=WHOLE) / WHOLE
