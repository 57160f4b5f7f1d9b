"""The allocator: the devices and CPU slots of this machine, with a broker for each kind that tests name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from pytest_accel.core.device import Device, DeviceNeed, PretendVendor
from pytest_accel.core.kinds import PJRT_DEVICE
from pytest_accel.hardware.availability import Guard
from pytest_accel.hardware.device_order import ties
from pytest_accel.hardware.health import HealthVendor
from pytest_accel.hardware.inventory import Inventory, Machine
from pytest_accel.hardware.matching import candidates, shortfall
from pytest_accel.hardware.shares import WHOLE, parts
from pytest_accel.leases.broker import Broker
from pytest_accel.leases.demand import MachineDemand, RemoteDevicesError, UnfitDevicesError
from pytest_accel.leases.device_locks import DeviceLocks, is_outer, who_holds
from pytest_accel.leases.policy import Lease, Request
from pytest_accel.leases.shared_folder import default_folder


def request_for(number: int, need: DeviceNeed, inventory: Inventory) -> Request:
    """Return the request with the id `number` for devices of `inventory`."""
    fitting = candidates(need, inventory)
    return Request(
        number,
        tuple(device.id for device in fitting),
        need.count,
        ties=tuple(ties(fitting, need.near)) if need.count > 1 and need.share is None else (),
        parts=tuple(parts(need.share, device) or WHOLE for device in fitting) if need.share else (),
        sets=need.sets,
    )


class Allocator:
    """The :class:`~pytest_accel.leases.demand.LeaseSource` of this machine. Not thread-safe: the pool has a lock.

    It has a broker for each kind, created at its first use. The kind None means the CPU slots, which need no device.
    """

    name = ""

    def __init__(
        self,
        machine: Machine,
        slots: int,
        on_wanted: Callable[[int], None],
        on_lost: Callable[[int, str], None],
        *,
        waits_for_busy: bool,
    ) -> None:
        """`slots` is the number of CPU slots. `waits_for_busy` is True for ``accel_busy = wait``.

        ``on_wanted(number)`` and ``on_lost(number, why)`` are called like those of :class:`Broker`.
        """
        self.slots = slots
        self._machine = machine
        self._on_wanted = on_wanted
        self._on_lost = on_lost
        self._waits_for_busy = waits_for_busy
        self._brokers: dict[str | None, Broker] = {}
        self._guards: dict[str | None, Guard] = {}
        self._kinds: dict[int, str | None] = {}
        """The kind of each request and lease, by its number."""
        self._outer: dict[str, tuple[Path, dict[str, str]]] = {}
        """The result of `_find_outer` for each kind that is in use."""

    def submit(self, demand: MachineDemand, answer: Callable[[tuple[Device, ...] | Exception], None]) -> None:
        """Request a lease, see :meth:`LeaseSource.submit`. Raise any error that is known at once."""
        number, need, kind = demand.number, demand.need, demand.kind
        by_id: dict[str, Device] = {}
        if need is None or kind is None:
            request = Request(number, (), 0, slots=min(demand.world.key.ranks, self.slots))
        else:
            inventory = self._inventory(kind)
            if demand.mask is not None:
                inventory = self._shown(demand.mask, need, inventory)
            by_id = {device.id: device for device in inventory.devices}
            request = request_for(number, need, inventory)

        def answered(lease: Lease | Exception) -> None:
            if isinstance(lease, Exception):
                self._kinds.pop(number, None)
                answer(lease)
            else:
                answer(tuple(by_id[name] for name in lease.devices))

        broker = self._broker(kind)
        self._kinds[number] = kind
        broker.submit(request, demand.world, answered)

    def cancel(self, number: int) -> bool:
        """Cancel a request; return False if it does not wait (it was granted, has failed or was cancelled)."""
        if number not in self._kinds or not self._broker(self._kinds[number]).cancel(number):
            return False
        del self._kinds[number]
        return True

    def obstacles(self, number: int) -> list[str] | None:
        """Return a line for each reason why a request waits: holders, refused devices, and earlier requests.

        Return None if the request does not wait (any more).
        """
        kind = self._kinds.get(number)
        obstacles = self._broker(kind).obstacles(number)
        if obstacles is None:
            return None
        others = () if kind is None else self._inventory(kind).devices
        reasons = {one.id: self._refuses(kind, one.id) for one in others if one.id not in obstacles.holders}
        return obstacles.lines({name: why for name, why in reasons.items() if why is not None})

    def unavailable(self, demand: MachineDemand) -> str | None:
        """Return why `demand` cannot be met any more because devices were set aside in this session, or None."""
        if demand.need is None or demand.kind is None:
            return None
        set_aside = self._set_aside(demand.kind)
        missing = shortfall(demand.need, self._inventory(demand.kind)) if set_aside else None
        if missing is None:
            return None
        return "\n".join([missing, *(f"{name} was set aside: {why}" for name, why in set_aside.items())])

    def pass_on(self, lease: int, request: int | None) -> bool:
        """Transfer a lease to a request, see :meth:`Broker.pass_on`."""
        kind = self._kinds.get(lease)
        if request is None:
            return kind is not None and self._broker(kind).pass_on(lease, None)
        if kind is None or self._kinds.get(request) != kind or not self._broker(kind).pass_on(lease, request):
            return False
        del self._kinds[request]
        return True

    def describe(self, number: int, *, pids: Sequence[int] | None = None, test: str | None = None) -> None:
        """Record in the lock files which processes or which test use a lease, see :meth:`Broker.describe`."""
        processes = None if pids is None else [(pid, made) for pid in pids if (made := _created(pid)) is not None]
        if number in self._kinds:
            self._broker(self._kinds[number]).describe(number, processes=processes, test=test)

    def give_back(self, number: int, *, killed: bool) -> None:
        """Release a lease after its processes have ended.

        If they were `killed`, its devices are not leased again before these processes have released their memory.
        """
        if number not in self._kinds:
            return
        kind = self._kinds.pop(number)
        broker = self._broker(kind)
        if killed and kind in self._guards:
            self._guards[kind].suspect(*broker.users(number))
        broker.release(number)

    @property
    def missing(self) -> list[str]:
        """A line for each device with less free memory than at the session's start: how much, and who uses it."""
        guards = self._guards.values()
        return [f"{name}: {text}" for guard in guards for name, text in guard.missing.items()]

    def close(self) -> None:
        """Release all leases."""
        for broker in self._brokers.values():
            broker.close()

    def _broker(self, kind: str | None) -> Broker:
        if kind not in self._brokers:
            if kind is None:
                self._brokers[kind] = Broker((), self.slots, None, self._on_wanted)
            else:
                devices, vendor = self._machine.of(kind).devices, self._machine.vendor(kind)
                if isinstance(vendor, HealthVendor):
                    self._guards[kind] = Guard(vendor, devices, self._machine.main_pid, waits=self._waits_for_busy)
                private = isinstance(vendor, PretendVendor) and not vendor.shared
                locks = None if private else DeviceLocks(self._find_outer(kind)[0], partial(self._refuses, kind))
                names = [device.id for device in devices]
                self._brokers[kind] = Broker(names, 0, locks, self._on_wanted, on_lost=self._on_lost)
        return self._brokers[kind]

    def _find_outer(self, kind: str) -> tuple[Path, dict[str, str]]:
        """Return the folder for the locks of `kind`, and the devices that a test holds inside which this session runs.

        If the test holds all that `HELD` names, this session leases them, with locks that only sessions inside the test
        use. Otherwise it has none of them, because the test may wait for it, and it must not wait for the test.
        """
        if kind not in self._outer:
            folder, held, vendor = default_folder(), self._machine.held, self._machine.vendor(kind)
            private = isinstance(vendor, PretendVendor) and not vendor.shared
            claimed = held.devices if held is not None and (held.kind, held.lock_folder) == (kind, str(folder)) else ()
            names = () if private else {*claimed, *(device.id for device in self._machine.of(kind).devices)}
            outer = {name: one for name in names if (one := who_holds(folder, name)) is not None and is_outer(one)}
            why = "this session runs inside the test that holds it"
            set_aside = {name: f"{why}: {one}" for name, one in outer.items()}
            if held is not None and claimed and outer.keys() >= {*claimed}:
                folder, set_aside = Path(held.inner_lock_folder), {}
            self._outer[kind] = folder, set_aside
        return self._outer[kind]

    def _refuses(self, kind: str | None, device: str) -> str | None:
        return self._guards[kind].refuses(device) if kind in self._guards else None

    def _set_aside(self, kind: str) -> Mapping[str, str]:
        return {**self._find_outer(kind)[1], **(self._guards[kind].aside if kind in self._guards else {})}

    def _inventory(self, kind: str) -> Inventory:
        """Return the session's inventory of `kind` without the devices that were set aside since it started."""
        inventory, set_aside = self._machine.of(kind), self._set_aside(kind)
        if not set_aside:
            return inventory
        return replace(inventory, devices=tuple(device for device in inventory.devices if device.id not in set_aside))

    def _shown(self, mask: str, need: DeviceNeed, inventory: Inventory) -> Inventory:
        """Return `inventory` with only the devices that `mask` shows.

        Raise :class:`~pytest_accel.leases.demand.UnfitDevicesError` if they do not suffice for `need`.
        """
        vendor = self._machine.vendor(inventory.kind)
        variable = next((name for name in vendor.mask_variables if name != PJRT_DEVICE), None)
        if variable is None:
            raise RemoteDevicesError(f"{inventory.kind} devices have no mask, by which a cluster could name them")
        # The other variables may set the order in which the mask counts devices (CUDA_DEVICE_ORDER).
        environ = {name: value for name, value in os.environ.items() if name not in vendor.mask_variables}
        names = {device.id for device in vendor.visible(vendor.discover(), {**environ, variable: mask})}
        shown = replace(inventory, devices=tuple(device for device in inventory.devices if device.id in names))
        missing = shortfall(need, shown)
        if missing is not None:
            raise UnfitDevicesError(f"the cluster has reserved {variable}={mask}, but the test {missing}")
        return shown


def _created(pid: int) -> float | None:
    """Return the creation time of a process; None if it cannot be found out."""
    try:
        return psutil.Process(pid).create_time()
    except (psutil.Error, OSError):
        return None  # The process has ended and uses no device; or this process has run out of file descriptors.
