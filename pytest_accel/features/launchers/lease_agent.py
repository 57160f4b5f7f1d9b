"""The agent's side of leases on its machine: takes them, with this machine's locks, for the driver's session."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from traceback import format_exc
from typing import Any

from pytest_accel.core import loop_tasks, threads
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
        self._thread: threading.Thread | None = None
        """The thread of the leases, once there is a machine."""
        self._leases: Leases | None = None
        self._run: asyncio.Task[None] | None = None
        self._requests: dict[int, asyncio.Task[None]] = {}
        """The requests that wait, by number."""
        self._granted: dict[int, HeldLease] = {}
        """The leases by number, from their grant until they are returned."""

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
            tasks = [*self._requests.values(), *([self._run] if self._run is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._leases is not None:
                self._leases.close()
            self._loop.stop()

        if self._thread is not None:
            asyncio.run_coroutine_threadsafe(close(), self._loop)
        if self._thread is None or threads.end(self._thread):
            self._loop.close()

    def _prepare(self, settings: Settings) -> Machine:
        """Return the machine, which the first settings describe."""
        if self._machine is None:
            machine = self._make_machine(settings)
            waits = settings.busy == "wait"
            self._thread = threads.start(self._loop.run_forever, "accel-leases")
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
        self._loop.set_exception_handler(lambda loop, context: self._fail(context))
        self._leases = Leases(machine, 0, self._wanted, self._lost, waits_for_busy=waits)
        self._run = loop_tasks.start(self._leases.run())

    def _fail(self, context: dict[str, Any]) -> None:
        """Fail all requests, those to come too, since the leases of this machine have ended with an error."""
        self._leases = None
        self._unusable = f"the leases of this machine have ended with an error: {context['message']}"
        for number, task in self._requests.items():
            task.cancel()
            self._send(LeaseFailed(number, self._unusable))

    def _serve(self, message: RequestLease | LeaseReturn | LeaseUsers) -> None:
        if isinstance(message, RequestLease):
            number = message.demand.number
            task = self._requests[number] = loop_tasks.start(self._lease(message.demand))
            task.add_done_callback(lambda done: self._requests.pop(number))
        elif message.number in self._granted and self._leases is not None:
            if isinstance(message, LeaseUsers):
                self._leases.describe(self._granted[message.number], pids=message.pids)
            else:
                self._leases.give_back(self._granted.pop(message.number), killed=message.killed)
        elif message.number in self._requests and isinstance(message, LeaseReturn):
            self._requests[message.number].cancel()

    async def _lease(self, demand: MachineDemand) -> None:
        """Take a lease, and tell the driver its devices, or why there is none."""
        if self._leases is None:
            self._send(LeaseFailed(demand.number, self._unusable))
            return
        # The lock file must name a process of this machine, for the other sessions here.
        holder = replace(demand.world.holder, pid=os.getpid())
        try:
            lease = await self._leases.take(replace(demand.world, holder=holder), need=demand.need, mask=demand.mask)
        except (LockFolderError, UnfitDevicesError) as error:
            self._send(LeaseFailed(demand.number, str(error), isinstance(error, UnfitDevicesError)))
            return
        except Exception:
            self._send(LeaseFailed(demand.number, format_exc()))
            return
        self._granted[demand.number] = lease
        self._send(LeaseGranted(demand.number, lease.devices))
        if lease.wanted:
            self._wanted(lease)

    def _wanted(self, lease: HeldLease) -> None:
        if (number := self._number(lease)) is not None:
            self._send(LeaseWanted(number))

    def _lost(self, lease: HeldLease, why: str) -> None:
        if (number := self._number(lease)) is not None:
            self._send(LeaseLost(number, why))

    def _number(self, lease: HeldLease) -> int | None:
        """Return the number of a lease that the driver knows."""
        return next((number for number, one in self._granted.items() if one is lease), None)
