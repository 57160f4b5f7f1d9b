"""The agent's side of leases on its machine: takes them, with this machine's locks, for the driver's session."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from traceback import format_exc

from pytest_accel.core import threads
from pytest_accel.features.launchers.lease_messages import (
    InventoryReply,
    InventoryRequest,
    LeaseFailed,
    LeaseGranted,
    LeaseLost,
    LeaseReturn,
    LeaseUsers,
    LeaseWanted,
    MachineDemand,
    RequestLease,
    UseSettings,
)
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.leases import HeldLease, Leases, UnfitDevicesError
from pytest_accel.leases.shared_folder import LockFolderError
from pytest_accel.settings.options import Settings


class LeaseAgent:
    """Takes leases on this machine for the driver. :meth:`handle` is called in one thread only.

    The leases live in a thread of their own with an asyncio loop, as those of the pool do.
    """

    def __init__(self, send: Callable[[object], None], make_machine: Callable[[Settings], Machine]) -> None:
        """`make_machine` makes the :class:`Machine` of this machine from the session's settings."""
        self._send = send
        self._make_machine = make_machine
        self._machine: Machine | None = None
        self._unusable = "the session has not sent its settings"
        """Why no device can be leased, if there is no machine."""
        self._loop = asyncio.SelectorEventLoop()
        self._leases: Leases | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The task of each lease, from its request until it is returned."""
        self._numbers: dict[HeldLease, int] = {}
        """The number of each lease that was granted."""
        self._thread = threads.start(self._loop.run_forever, "accel-leases")

    def handle(self, message: object) -> None:
        """Handle a message of the driver."""
        if isinstance(message, UseSettings):
            try:
                self._prepare(message.settings)
            except Exception as error:
                self._unusable = str(error)
        elif isinstance(message, InventoryRequest):
            self._send_inventory(message)
        elif isinstance(message, RequestLease) and self._machine is None:
            self._send(LeaseFailed(message.demand.number, self._unusable))
        elif isinstance(message, (RequestLease, LeaseReturn, LeaseUsers)):
            self._loop.call_soon_threadsafe(self._serve, message)

    def close(self) -> None:
        """Return all leases."""

        async def close() -> None:
            for task in self._tasks.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values())
            if self._leases is not None:
                self._leases.close()
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(close(), self._loop)
        if threads.end(self._thread):
            self._loop.close()

    def _prepare(self, settings: Settings) -> Machine:
        """Return the machine, which the first settings describe."""
        if self._machine is None:
            machine = self._make_machine(settings)
            waits = settings.busy == "wait"
            self._loop.call_soon_threadsafe(self._open, machine, waits)
            self._machine = machine
        return self._machine

    def _send_inventory(self, message: InventoryRequest) -> None:
        try:
            self._send(InventoryReply(message.kind, self._prepare(message.settings).of(message.kind)))
        except Exception as error:
            self._send(InventoryReply(message.kind, None, str(error)))

    # In the thread of the leases

    def _open(self, machine: Machine, waits: bool) -> None:
        self._leases = Leases(machine, 0, self._wanted, self._lost, waits_for_busy=waits)
        self._tasks[0] = self._loop.create_task(self._leases.run())

    def _serve(self, message: RequestLease | LeaseReturn | LeaseUsers) -> None:
        if isinstance(message, RequestLease):
            self._tasks[message.demand.number] = self._loop.create_task(self._lease(message.demand))
        elif isinstance(message, LeaseUsers):
            for lease in [lease for lease, number in self._numbers.items() if number == message.number]:
                assert self._leases is not None
                self._leases.describe(lease, pids=message.pids)
        elif (task := self._tasks.pop(message.number, None)) is not None:
            task.cancel(msg=message.killed)

    async def _lease(self, demand: MachineDemand) -> None:
        """Take a lease, and keep it until this task is cancelled. Its message says whether processes were killed."""
        leases = self._leases
        assert leases is not None
        # The lock file must name a process of this machine, for the other sessions here.
        holder = replace(demand.world.holder, pid=os.getpid())
        try:
            lease = await leases.take(replace(demand.world, holder=holder), need=demand.need, mask=demand.mask)
        except (LockFolderError, UnfitDevicesError) as error:
            self._send(LeaseFailed(demand.number, str(error), isinstance(error, UnfitDevicesError)))
            return
        except Exception:
            self._send(LeaseFailed(demand.number, format_exc()))
            return
        self._numbers[lease] = demand.number
        self._send(LeaseGranted(demand.number, lease.devices))
        if lease.wanted:
            self._wanted(lease)
        killed = False
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            killed = bool(error.args and error.args[0])
            raise
        finally:
            del self._numbers[lease]
            leases.give_back(lease, killed=killed)

    def _wanted(self, lease: HeldLease) -> None:
        if lease in self._numbers:
            self._send(LeaseWanted(self._numbers[lease]))

    def _lost(self, lease: HeldLease, why: str) -> None:
        if lease in self._numbers:
            self._send(LeaseLost(self._numbers[lease], why))
