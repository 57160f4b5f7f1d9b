"""Leases on devices of another machine, as the driver requests them of an agent there, which takes the locks there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from pytest_accel.core import loop_tasks
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
    MachineDemand,
    RequestLease,
    UseSettings,
)
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.leases.leases import UnfitDevicesError
from pytest_accel.settings.options import Settings

_INVENTORY_TIMEOUT = 60.0
"""Seconds in which an agent must look up the devices of a kind: a driver may take some to initialise many of them. The
connection to an agent that is stopped (SIGSTOP) stays open, so its end is not enough."""


class RemoteDevicesError(Exception):
    """The devices of another machine are not available; the message says why."""


class LostMachineError(RemoteDevicesError):
    """The connection to the machine or its agent is lost."""


class _Remote:
    """A lease, or the request for one."""

    def __init__(self, on_wanted: Callable[[], None], on_lost: Callable[[str], None]) -> None:
        self.on_wanted = on_wanted
        self.on_lost = on_lost
        self.granted: asyncio.Future[tuple[Device, ...]] = asyncio.get_running_loop().create_future()


class RemoteLeases:
    """The devices of one other machine. Leases are used in one thread, the pool's, with an asyncio loop."""

    def __init__(self, name: str, send: Callable[[object], None]) -> None:
        """`name` is the machine's name; `send` sends a message to the agent."""
        self.name = name
        self._send = send
        self._answered = threading.Condition()
        """Notified when an inventory has arrived or the agent is lost."""
        self._lost = False
        self._inventories: dict[str, InventoryReply] = {}
        self._leases: dict[int, _Remote] = {}
        """The leases that were requested and have not been returned, by number. Used in the pool's thread only."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The pool's loop, once a lease was requested."""

    def use(self, settings: Settings) -> None:
        """Have the agent lease devices by `settings`. Needed before the first lease if no inventory was requested."""
        self._send(UseSettings(settings))

    def inventory(self, kind: str, settings: Settings) -> Inventory:
        """Return the machine's devices of `kind`; raise :class:`RemoteDevicesError` if they cannot be looked up."""
        if kind not in self._inventories:
            self._send(InventoryRequest(kind, settings))
            with self._answered:
                self._answered.wait_for(lambda: self._lost or kind in self._inventories, _INVENTORY_TIMEOUT)
                why = (
                    "the machine is lost" if self._lost else f"its agent did not answer within {_INVENTORY_TIMEOUT:g} s"
                )
                self._inventories.setdefault(kind, InventoryReply(kind, None, why))
        seen = self._inventories[kind]
        if seen.inventory is None:
            raise RemoteDevicesError(f"the {kind} devices of {self.name} cannot be looked up: {seen.error}")
        return seen.inventory

    # In the pool's thread

    async def take(
        self, demand: MachineDemand, on_wanted: Callable[[], None], on_lost: Callable[[str], None]
    ) -> tuple[Device, ...]:
        """Wait for a lease, and return its devices. Raise :class:`RemoteDevicesError` if there will be none.

        `on_wanted` is called, here or later, when another request waits for the devices, and `on_lost` with the reason
        when the lock of one was lost.
        """
        self._loop = asyncio.get_running_loop()
        remote = self._leases[demand.number] = _Remote(on_wanted, on_lost)
        self._send(RequestLease(demand))
        if self._lost:
            self._lose()
        try:
            return await remote.granted
        except (RemoteDevicesError, UnfitDevicesError):
            self._leases.pop(demand.number, None)
            raise
        except BaseException:
            self.give_back(demand.number, killed=False)
            raise

    def describe(self, number: int, pids: Sequence[int]) -> None:
        """Tell sessions of the machine which processes use a lease."""
        self._send(LeaseUsers(number, tuple(pids)))

    def give_back(self, number: int, *, killed: bool) -> None:
        """Return a lease, or cancel its request. `killed` says whether processes that used the devices were killed."""
        if self._leases.pop(number, None) is not None:
            self._send(LeaseReturn(number, killed))

    def _handle(self, message: LeaseGranted | LeaseFailed | LeaseWanted | LeaseLost) -> None:
        remote = self._leases.get(message.number)
        if remote is None:
            return
        match message:
            case LeaseGranted(_, devices):
                if not remote.granted.done():
                    remote.granted.set_result(devices)
            case LeaseFailed(_, text, unfit):
                error = UnfitDevicesError if unfit else RemoteDevicesError
                loop_tasks.fail(remote.granted, error(f"{text} (on {self.name})"))
            case LeaseWanted():
                remote.on_wanted()
            case LeaseLost(_, why):
                remote.on_lost(f"{why} (on {self.name})")

    def _lose(self) -> None:
        for remote in self._leases.values():
            loop_tasks.fail(remote.granted, LostMachineError(f"the machine {self.name} is lost"))

    # In the thread that receives the agent's messages

    def handle(self, message: object) -> None:
        """Handle a message of the agent."""
        if isinstance(message, InventoryReply):
            with self._answered:
                self._inventories[message.kind] = message
                self._answered.notify_all()
        elif isinstance(message, (LeaseGranted, LeaseFailed, LeaseWanted, LeaseLost)):
            self._post(self._handle, message)

    def lose(self) -> None:
        """Fail all waiting requests, since the connection to the machine or its agent is lost."""
        with self._answered:
            self._lost = True
            self._answered.notify_all()
        self._post(self._lose)

    def _post(self, method: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # The pool is closed.
            if self._loop is not None:
                self._loop.call_soon_threadsafe(method, *arguments)
