"""The demand of a session's tests for devices, as an xdist worker sends it and as the scheduler uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    """The tests of a collection that need a world, and the keys of their worlds."""

    keys: tuple[WorldKey, ...]
    tests: tuple[tuple[int, int], ...]
    """The index of each test in the collection, and the index of its key; tests that cannot run are left out."""

    @classmethod
    def of(cls, wanted: Iterable[tuple[int, WorldKey]]) -> Demand:
        """Make a demand from the indices of tests and their keys.

        The keys lose their environment variables: no need depends on them, and messages cannot carry all characters.
        """
        numbers: dict[WorldKey, int] = {}
        tests = tuple((index, numbers.setdefault(key, len(numbers))) for index, key in wanted)
        return cls(tuple(replace(key, env=()) for key in numbers), tests)

    def needs(self, machine: Machine, slots: int) -> list[Need]:
        """Return the needs of the tests: first the need of a test without a world, then one for each key."""
        return [Need(), *(_need(key, machine, slots) for key in self.keys)]

    def kinds(self) -> list[str]:
        """Return the kind of device for each of the :meth:`needs`."""
        return [NO_DEVICE, *(key.used_kind for key in self.keys)]

    def requests(self, count: int, machine: Machine, slots: int) -> list[Request | None]:
        """Return the request of each of the `count` tests of the collection."""
        needs, need_of = self.needs(machine, slots), self._need_of()
        return [needs[need_of.get(index, 0)].request for index in range(count)]

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
        kinds = dict.fromkeys(key.kind for key in self.keys if key.need is not None)
        return {device.id: WHOLE for kind in kinds for device in machine.of(kind).devices}


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
