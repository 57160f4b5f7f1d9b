"""Who has what of a session's devices and slots, now."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_accel.hardware.shares import WHOLE

if TYPE_CHECKING:
    from pytest_accel.leases.locks import Holder


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use `devices`, and to run `slots` ranks on the CPU, until given back."""

    id: int
    devices: tuple[str, ...]
    """As :class:`~pytest_accel.leases.policy.Grant` has them: a device is there twice for two sets of a world."""
    slots: int
    parts: tuple[int, ...] = ()
    """What it has of each of `devices`, one for one; empty: all."""

    def takes(self) -> Iterator[tuple[str, int]]:
        """Each of `devices` with the parts of it."""
        return zip(self.devices, self.parts or (WHOLE,) * len(self.devices), strict=True)


@dataclass(slots=True)
class Held:
    """A lease that has not been given back, and whose it is."""

    lease: Lease
    holder: Holder
    told: bool = False
    """Whether it has been said that somebody waits for this lease."""


class Holdings:
    """The leases of a session's `devices` and `slots`. Not thread-safe."""

    def __init__(self, devices: Sequence[str], slots: int) -> None:
        self.devices = tuple(devices)
        self.free_slots = slots
        self.leases: dict[int, Held] = {}
        self._slots = slots
        self._used: dict[str, int] = {}

    @property
    def held(self) -> Collection[str]:
        """The devices of which somebody has a part."""
        return self._used.keys()

    @property
    def part(self) -> float:
        """The part of all devices that somebody has."""
        return sum(self._used.values()) / (WHOLE * len(self.devices)) if self.devices else 0.0

    def free(self, without: Collection[str]) -> dict[str, int]:
        """The parts of each device that nobody has; of those in `without` none."""
        return {name: WHOLE - self._used.get(name, 0) for name in self.devices if name not in without}

    def add(self, lease: Lease, holder: Holder) -> None:
        """Note a lease that has been granted."""
        self.leases[lease.id] = Held(lease, holder)
        self.free_slots -= lease.slots
        for device, parts in lease.takes():
            self._used[device] = self._used.get(device, 0) + parts

    def remove(self, lease_id: int) -> list[str]:
        """Forget a lease; gives the devices of which nobody has a part any more. Nothing happens if it is not there."""
        held = self.leases.pop(lease_id, None)
        if held is None:
            return []
        self.free_slots += held.lease.slots
        for device, parts in held.lease.takes():
            self._used[device] -= parts
        left = [device for device in dict.fromkeys(held.lease.devices) if not self._used[device]]
        for device in left:
            del self._used[device]
        return left

    def clear(self) -> None:
        """Forget every lease."""
        self.leases.clear()
        self._used.clear()
        self.free_slots = self._slots

    def holder(self, device: str) -> Holder:
        """Who has a held device: of several, the first, with the tests and the processes of all."""
        holders = [held.holder for held in self.leases.values() if device in held.lease.devices]
        return replace(
            min(holders, key=lambda holder: holder.since),
            test=", ".join(dict.fromkeys(holder.test for holder in holders)),
            processes=tuple(process for holder in holders for process in holder.processes),
        )
