"""The current leases of a session, and which devices and slots they use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_accel.hardware.shares import WHOLE

if TYPE_CHECKING:
    from pytest_accel.leases.locks import Holder


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use `devices`, and to run `slots` ranks on the CPU, until the lease is released."""

    id: int
    devices: tuple[str, ...]
    """In the order of :class:`~pytest_accel.leases.policy.Grant`; a device that is in two sets occurs twice."""
    slots: int
    parts: tuple[int, ...] = ()
    """Parts of each of `devices` that the lease has, in the same order; empty: whole devices."""

    def takes(self) -> Iterator[tuple[str, int]]:
        """Return pairs of each device and the parts of it that the lease has."""
        return zip(self.devices, self.parts or (WHOLE,) * len(self.devices), strict=True)


@dataclass(slots=True)
class Held:
    """A lease that has not been released, with its holder."""

    lease: Lease
    holder: Holder
    notified: bool = False
    """True if ``on_wanted`` has been called for this lease."""


class LeaseTable:
    """The current leases on a session's `devices` and CPU `slots`, owned by the broker. Not thread-safe."""

    def __init__(self, devices: Sequence[str], slots: int) -> None:
        self.devices = tuple(devices)
        self.free_slots = slots
        self.leases: dict[int, Held] = {}
        self._slots = slots
        self._used: dict[str, int] = {}

    @property
    def held(self) -> Collection[str]:
        """The devices that are leased, in whole or in part."""
        return self._used.keys()

    @property
    def used_fraction(self) -> float:
        """The leased fraction of all devices, from 0 to 1."""
        return sum(self._used.values()) / (WHOLE * len(self.devices)) if self.devices else 0.0

    def free(self, without: Collection[str]) -> dict[str, int]:
        """Return the free parts of each device, leaving out the devices in `without`."""
        return {name: WHOLE - self._used.get(name, 0) for name in self.devices if name not in without}

    def add(self, lease: Lease, holder: Holder) -> None:
        """Record a lease that has been granted."""
        self.leases[lease.id] = Held(lease, holder)
        self.free_slots -= lease.slots
        for device, parts in lease.takes():
            self._used[device] = self._used.get(device, 0) + parts

    def remove(self, lease_id: int) -> list[str]:
        """Remove a lease and return its devices that are now entirely free; an unknown lease is ignored."""
        held = self.leases.pop(lease_id, None)
        if held is None:
            return []
        self.free_slots += held.lease.slots
        for device, parts in held.lease.takes():
            self._used[device] -= parts
        freed = [device for device in dict.fromkeys(held.lease.devices) if not self._used[device]]
        for device in freed:
            del self._used[device]
        return freed

    def clear(self) -> None:
        """Remove every lease."""
        self.leases.clear()
        self._used.clear()
        self.free_slots = self._slots

    def holder(self, device: str) -> Holder:
        """Return the holder of a leased device; of several, the earliest, with the tests and processes of all."""
        holders = [held.holder for held in self.leases.values() if device in held.lease.devices]
        return replace(
            min(holders, key=lambda holder: holder.since),
            test=", ".join(dict.fromkeys(holder.test for holder in holders)),
            processes=tuple(process for holder in holders for process in holder.processes),
        )
