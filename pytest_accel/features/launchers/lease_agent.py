"""The agent's side of leases on its machine: takes them, with this machine's locks, for the driver's session."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace

from pytest_accel.core.device import Device
from pytest_accel.features.launchers.lease_messages import (
    InventoryReply,
    InventoryRequest,
    LeaseFailed,
    LeaseGranted,
    LeaseLost,
    LeaseReturn,
    LeaseUsers,
    LeaseWanted,
    RequestLease,
    UseSettings,
)
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.allocator import Allocator
from pytest_accel.leases.demand import MachineDemand, UnfitDevicesError
from pytest_accel.leases.shared_folder import LockFolderError
from pytest_accel.settings.options import Settings


class LeaseAgent:
    """Takes leases on this machine for the driver. :meth:`handle` is called in one thread only.

    A request and its lease have the driver's number here, too, so notices need no translation. One may precede the
    answer to its request.
    """

    def __init__(self, send: Callable[[object], None], make_machine: Callable[[Settings], Machine]) -> None:
        """`make_machine` makes the :class:`Machine` of this machine from the session's settings."""
        self._send = send
        self._make_machine = make_machine
        self._machine: Machine | None = None
        self._allocator: Allocator | None = None
        self._unusable = "the session has not sent its settings"
        """Why no device can be leased, if there is no allocator."""

    def handle(self, message: object) -> None:
        """Handle a message of the driver."""
        if isinstance(message, UseSettings):
            try:
                self._prepare(message.settings)
            except Exception as error:
                self._unusable = str(error)
        elif isinstance(message, InventoryRequest):
            self._send_inventory(message)
        elif self._allocator is None:
            if isinstance(message, RequestLease):
                self._send(LeaseFailed(message.demand.number, self._unusable))
        elif isinstance(message, RequestLease):
            self._submit(message.demand, self._allocator)
        elif isinstance(message, LeaseReturn):
            if not self._allocator.cancel(message.number):
                self._allocator.give_back(message.number, killed=message.killed)
        elif isinstance(message, LeaseUsers):
            with contextlib.suppress(LockFolderError):  # For example a full disk; the lock itself is still held.
                self._allocator.describe(message.number, pids=message.pids)

    def close(self) -> None:
        """Return all leases."""
        if self._allocator is not None:
            self._allocator.close()

    def _prepare(self, settings: Settings) -> Machine:
        """Return the machine, which the first settings describe."""
        if self._machine is None:
            machine = self._make_machine(settings)
            waits = settings.busy == "wait"
            self._allocator = Allocator(machine, 0, self._wanted, self._lost, waits_for_busy=waits)
            self._machine = machine
        return self._machine

    def _send_inventory(self, message: InventoryRequest) -> None:
        try:
            self._send(InventoryReply(message.kind, self._prepare(message.settings).of(message.kind)))
        except Exception as error:
            self._send(InventoryReply(message.kind, None, str(error)))

    def _submit(self, demand: MachineDemand, allocator: Allocator) -> None:
        def answer(result: tuple[Device, ...] | Exception) -> None:
            if isinstance(result, Exception):
                self._send(LeaseFailed(demand.number, str(result), isinstance(result, UnfitDevicesError)))
            else:
                self._send(LeaseGranted(demand.number, result))

        # The lock file must name a process of this machine, for the other sessions here.
        holder = replace(demand.world.holder, pid=os.getpid())
        try:
            allocator.submit(replace(demand, world=replace(demand.world, holder=holder)), answer)
        except Exception as error:
            answer(error)

    def _wanted(self, number: int) -> None:
        self._send(LeaseWanted(number))

    def _lost(self, number: int, why: str) -> None:
        self._send(LeaseLost(number, why))
