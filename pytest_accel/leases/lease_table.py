"""The current leases of a session: who holds which devices and slots."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.policy import Lease


@dataclass(slots=True)
class _Held:
    lease: Lease
    holder: Holder
    notified: bool = False
    """True if the holder has been notified that somebody waits for what the lease holds."""


class LeaseTable:
    """The current leases on a session's `devices` and CPU `slots`. Owned by the broker. Not thread-safe.

    Only this class changes the state of a lease: :meth:`add` grants it, :meth:`notify` records that its holder knows
    that somebody waits for it, :meth:`transfer` gives it to another holder, and :meth:`remove` ends it.
    """

    def __init__(self, devices: Sequence[str], slots: int) -> None:
        self.devices = tuple(devices)
        self.free_slots = slots
        self._slots = slots
        self._leases: dict[int, _Held] = {}
        self._used: dict[str, int] = {}

    @property
    def held(self) -> Set[str]:
        """The devices that are leased, in whole or in part."""
        return self._used.keys()

    def __iter__(self) -> Iterator[Lease]:
        return (held.lease for held in self._leases.values())

    def get(self, lease_id: int) -> Lease | None:
        """Return the lease, or None if it is unknown or was removed."""
        held = self._leases.get(lease_id)
        return None if held is None else held.lease

    def free(self, without: Collection[str]) -> dict[str, int]:
        """Return the free parts of each device, leaving out the devices in `without`."""
        return {name: WHOLE - self._used.get(name, 0) for name in self.devices if name not in without}

    def add(self, lease: Lease, holder: Holder) -> None:
        """Record a lease that has been granted."""
        self._leases[lease.id] = _Held(lease, holder)
        self.free_slots -= lease.slots
        for device, parts in lease.takes():
            self._used[device] = self._used.get(device, 0) + parts

    def notify(self, lease_ids: Iterable[int]) -> int | None:
        """Mark the first of the leases whose holder has not been notified, and return it; None if all have been."""
        for lease_id in lease_ids:
            if not self._leases[lease_id].notified:
                self._leases[lease_id].notified = True
                return lease_id
        return None

    def transfer(self, lease_id: int, holder: Holder) -> None:
        """Give the lease, with the processes that use its devices, to another holder."""
        held = self._leases[lease_id]
        held.holder = replace(holder, processes=held.holder.processes)
        held.notified = False

    def describe(self, lease_id: int, processes: Sequence[tuple[int, float]] | None, test: str | None) -> None:
        """Change the processes or the test of a lease's holder; None leaves them as they are."""
        held = self._leases[lease_id]
        held.holder = replace(
            held.holder,
            processes=held.holder.processes if processes is None else tuple(processes),
            test=held.holder.test if test is None else test,
        )

    def remove(self, lease_id: int) -> None:
        """Remove a lease; an unknown one is ignored."""
        held = self._leases.pop(lease_id, None)
        if held is None:
            return
        self.free_slots += held.lease.slots
        for device, parts in held.lease.takes():
            self._used[device] -= parts
        for device in dict.fromkeys(held.lease.devices):
            if not self._used[device]:
                del self._used[device]

    def clear(self) -> None:
        """Remove every lease."""
        self._leases.clear()
        self._used.clear()
        self.free_slots = self._slots

    def holder(self, device: str) -> Holder:
        """Return the holder of a leased device; of several, the earliest, with the tests and processes of all."""
        holders = [held.holder for held in self._leases.values() if device in held.lease.devices]
        return replace(
            min(holders, key=lambda holder: holder.since),
            test=", ".join(dict.fromkeys(holder.test for holder in holders)),
            processes=tuple(process for holder in holders for process in holder.processes),
        )

    def processes(self, lease_id: int) -> tuple[int, ...]:
        """Return the pids of the processes that use a lease's devices; empty if the lease is unknown or was removed."""
        held = self._leases.get(lease_id)
        return () if held is None else tuple(pid for pid, _ in held.holder.processes)

    def users_of_slots(self) -> list[tuple[int, Holder]]:
        """Return the number of CPU slots and the holder of each lease that has any."""
        return [(held.lease.slots, held.holder) for held in self._leases.values() if held.lease.slots]
