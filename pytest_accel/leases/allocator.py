"""The allocator: a broker for each kind of device that tests name, and one for the CPU slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from pytest_accel.core.device import DeviceNeed, PretendVendor
from pytest_accel.hardware.availability import Guard
from pytest_accel.hardware.device_order import ties
from pytest_accel.hardware.health import HealthVendor
from pytest_accel.hardware.inventory import Inventory, Machine
from pytest_accel.hardware.matching import candidates, shortfall
from pytest_accel.hardware.shares import WHOLE, parts
from pytest_accel.leases.broker import Broker
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.lease_table import Lease
from pytest_accel.leases.lock_dir import default_folder
from pytest_accel.leases.locks import DeviceLocks
from pytest_accel.leases.policy import Request


def request_for(need: DeviceNeed, inventory: Inventory) -> Request:
    """Return the request for `need` to submit to a broker, which then assigns its id (here 0)."""
    fitting = candidates(need, inventory)
    return Request(
        0,
        tuple(device.id for device in fitting),
        need.count,
        ties=tuple(ties(fitting, need.near)) if need.count > 1 and need.share is None else (),
        parts=tuple(parts(need.share, device) or WHOLE for device in fitting) if need.share else (),
        sets=need.sets,
    )


class Allocator:
    """A broker for each kind, created at its first use. Not thread-safe: the pool calls it under its own lock.

    The kind None means the CPU slots, which need no device.
    """

    def __init__(
        self,
        machine: Machine,
        slots: int,
        on_wanted: Callable[[str | None, int], None],
        on_lost: Callable[[str | None, int, str], None],
        *,
        waits_for_busy: bool,
    ) -> None:
        """`slots` is the number of CPU slots. `waits_for_busy` is True for ``--accel-busy wait``.

        ``on_wanted(kind, lease)`` and ``on_lost(kind, lease, why)`` are called like those of :class:`Broker`.
        """
        self._slots = slots
        self._machine = machine
        self._on_wanted = on_wanted
        self._on_lost = on_lost
        self._waits_for_busy = waits_for_busy
        self._brokers: dict[str | None, Broker] = {}
        self._guards: dict[str | None, Guard] = {}

    def broker(self, kind: str | None) -> Broker:
        """Return the broker of the devices of `kind`."""
        if kind not in self._brokers:
            wanted = partial(self._on_wanted, kind)
            if kind is None:
                self._brokers[kind] = Broker((), self._slots, None, wanted)
            else:
                devices, vendor = self._machine.of(kind).devices, self._machine.vendor(kind)
                if isinstance(vendor, HealthVendor):
                    self._guards[kind] = Guard(vendor, devices, self._machine.main_pid, waits=self._waits_for_busy)
                private = isinstance(vendor, PretendVendor) and not vendor.shared
                locks = None if private else DeviceLocks(self._lock_folder(kind), partial(self._refuses, kind))
                names = [device.id for device in devices]
                self._brokers[kind] = Broker(names, 0, locks, wanted, on_lost=partial(self._on_lost, kind))
        return self._brokers[kind]

    def submit(
        self,
        kind: str,
        need: DeviceNeed,
        holder: Holder,
        on_grant: Callable[[Lease], None],
        on_failure: Callable[[Exception], None],
        only: Collection[str] | None = None,
    ) -> int:
        """Request the devices for `need`; return the id of the request at the kind's broker.

        `only` has the ids of the devices that may be granted; None: all of the session.
        """
        inventory = self._inventory(kind)
        if only is not None:
            inventory = replace(inventory, devices=tuple(one for one in inventory.devices if one.id in only))
        request = request_for(need, inventory)
        return self.broker(kind).submit(
            request.candidates,
            request.count,
            holder,
            on_grant,
            ties=request.ties,
            parts=dict(zip(request.candidates, request.parts, strict=True)) if request.parts else None,
            sets=request.sets,
            on_failure=on_failure,
        )

    def unavailable(self, kind: str, need: DeviceNeed) -> str | None:
        """Return why `need` cannot be met any more because devices were set aside in this session, or None."""
        set_aside = self._set_aside(kind)
        missing = shortfall(need, self._inventory(kind)) if set_aside else None
        if missing is None:
            return None
        return "\n".join([missing, *(f"{name} was set aside: {why}" for name, why in set_aside.items())])

    def obstacles(self, kind: str | None, request: int) -> list[str] | None:
        """Return a line for each reason why a request waits: holders, refused devices, and earlier requests.

        Return None if the request does not wait (any more).
        """
        obstacles = self.broker(kind).obstacles(request)
        if obstacles is None:
            return None
        others = () if kind is None else self._inventory(kind).devices
        reasons = {one.id: self._refuses(kind, one.id) for one in others if one.id not in obstacles.holders}
        return obstacles.lines({name: why for name, why in reasons.items() if why is not None})

    def give_back(self, kind: str | None, lease: Lease, *, killed: bool) -> None:
        """Release a lease after its processes have ended.

        If they were `killed`, its devices are not leased again before these processes have released their memory.
        """
        broker = self.broker(kind)
        if killed and kind in self._guards:
            self._guards[kind].suspect(lease.devices, broker.processes(lease.id))
        broker.release(lease.id)

    @property
    def missing(self) -> list[str]:
        """A line for each device with less free memory than at the session's start: how much, and who uses it."""
        guards = self._guards.values()
        return [f"{name}: {text}" for guard in guards for name, text in guard.missing.items()]

    def close(self) -> None:
        """Release all leases."""
        for broker in self._brokers.values():
            broker.close()

    def _lock_folder(self, kind: str) -> Path:
        folder, held = default_folder(), self._machine.held
        return folder if held is None else held.locks_for(kind, folder)

    def _refuses(self, kind: str | None, device: str) -> str | None:
        return self._guards[kind].refuses(device) if kind in self._guards else None

    def _set_aside(self, kind: str) -> Mapping[str, str]:
        return self._guards[kind].aside if kind in self._guards else {}

    def _inventory(self, kind: str) -> Inventory:
        """Return the session's inventory of `kind` without the devices that were set aside since it started."""
        inventory, set_aside = self._machine.of(kind), self._set_aside(kind)
        if not set_aside:
            return inventory
        return replace(inventory, devices=tuple(device for device in inventory.devices if device.id not in set_aside))
