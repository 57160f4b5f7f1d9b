"""What a session can hand out: the devices of each kind that tests name, and the ranks that may run on the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pytest_accel.core.device import DeviceNeed, PretendVendor
from pytest_accel.hardware.availability import Guard
from pytest_accel.hardware.health import HealthVendor
from pytest_accel.hardware.inventory import Inventory, Machine
from pytest_accel.hardware.matching import candidates, shortfall
from pytest_accel.hardware.shares import WHOLE, parts
from pytest_accel.hardware.topology import ties
from pytest_accel.leases.broker import Broker
from pytest_accel.leases.guarded import GuardedLocks
from pytest_accel.leases.lease_table import Lease
from pytest_accel.leases.locks import Holder
from pytest_accel.leases.policy import Request


def request_for(need: DeviceNeed, inventory: Inventory) -> Request:
    """What is asked of a broker for `need`; the request has no number yet."""
    fitting = candidates(need, inventory)
    return Request(
        0,
        tuple(device.id for device in fitting),
        need.count,
        ties=tuple(ties(fitting, need.near)) if need.count > 1 and need.share is None else (),
        parts=tuple(parts(need.share, device) or WHOLE for device in fitting) if need.share else (),
        sets=need.sets,
    )


class Supply:
    """A broker for each kind, made when it is first asked for. Not thread-safe: the pool calls it under its own lock.

    A kind that is None stands for the CPU slots, which need no device.
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
        """``on_wanted(kind, lease)`` and ``on_lost(kind, lease, why)``: as a :class:`Broker`'s.

        `waits_for_busy` is ``--accel-busy wait``.
        """
        self._slots = slots
        self._machine = machine
        self._on_wanted = on_wanted
        self._on_lost = on_lost
        self._waits_for_busy = waits_for_busy
        self._session = os.getpid()
        self._brokers: dict[str | None, Broker] = {}
        self._guards: dict[str, Guard] = {}

    def broker(self, kind: str | None) -> Broker:
        """The broker of the devices of `kind`."""
        if kind not in self._brokers:
            wanted = partial(self._on_wanted, kind)
            if kind is None:
                self._brokers[kind] = Broker((), self._slots, None, wanted)
            else:
                devices, vendor = self._machine.of(kind).devices, self._machine.vendor(kind)
                if isinstance(vendor, HealthVendor):
                    self._guards[kind] = Guard(vendor, devices, self._session, waits=self._waits_for_busy)
                private = isinstance(vendor, PretendVendor) and not vendor.shared
                locks = None if private else GuardedLocks(partial(self._refuses, kind))
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
    ) -> int:
        """Ask for what `need` says; the request's number at the kind's broker."""
        request = request_for(need, self._inventory(kind))
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

    def lost(self, kind: str, need: DeviceNeed) -> str | None:
        """Why `need` can be met no more, since devices were set aside in this session; None where it can."""
        aside = self._aside(kind)
        missing = shortfall(need, self._inventory(kind)) if aside else None
        if missing is None:
            return None
        return "\n".join([missing, *(f"{name} was set aside: {why}" for name, why in aside.items())])

    def obstacles(self, kind: str | None, request: int) -> list[str] | None:
        """Return who has what a request waits for, and why other devices cannot be had, an entry for each.

        None if the request does not wait (any more).
        """
        broker = self.broker(kind)
        holders = broker.holders(request)
        if holders is None:
            return None
        ahead = [f"{_holder(one)} has waited longer" for one in broker.ahead_of(request)]
        if kind is None:
            slots = [(f"{count} of {self._slots}", count, one) for count, one in broker.users_of_slots()]
            return [f"{name} {_held(count)} by {_holder(one)}" for name, count, one in slots] + ahead
        by_holder: dict[Holder, list[str]] = {}
        for name, one in holders.items():
            by_holder.setdefault(one, []).append(name)
        lines = [f"{', '.join(names)} {_held(len(names))} by {_holder(one)}" for one, names in by_holder.items()]
        others = [device.id for device in self._inventory(kind).devices if device.id not in holders]
        return lines + [f"{name} {why}" for name in others if (why := self._refuses(kind, name)) is not None] + ahead

    def give_back(self, kind: str | None, lease: Lease, *, killed: bool) -> None:
        """The processes that used a lease are gone; where they were `killed`, their memory must come back first."""
        broker = self.broker(kind)
        if killed and kind in self._guards:
            self._guards[kind].suspect(lease.devices)
        broker.release(lease.id)

    def close(self) -> None:
        """Give all leases back."""
        for broker in self._brokers.values():
            broker.close()

    def _refuses(self, kind: str, device: str) -> str | None:
        return self._guards[kind].refuses(device) if kind in self._guards else None

    def _aside(self, kind: str) -> dict[str, str]:
        return self._guards[kind].aside if kind in self._guards else {}

    def _inventory(self, kind: str) -> Inventory:
        """What the session has of `kind`, without what was set aside since it began."""
        inventory, aside = self._machine.of(kind), self._aside(kind)
        if not aside:
            return inventory
        return replace(inventory, devices=tuple(one for one in inventory.devices if one.id not in aside))


def _held(count: int) -> str:
    return "is held" if count == 1 else "are held"


def _holder(holder: Holder) -> str:
    """Return the holder in words: ``pid 71 (ada) for test_big.py::test_one since 10:15:00``."""
    if not holder.pid:
        return "a session that has not said who it is"
    moment = time.localtime(holder.since)
    today = moment[:3] == time.localtime()[:3]
    since = time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", moment)
    return f"pid {holder.pid} ({holder.user}) for {holder.test} since {since}"
