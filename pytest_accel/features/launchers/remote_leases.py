"""Leases on devices of another machine: an agent there takes them, with that machine's locks, for this session."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from traceback import format_exc

from msgspec import Struct

from pytest_accel.core.device import Device
from pytest_accel.hardware.inventory import Inventory, Machine
from pytest_accel.leases.allocator import Allocator
from pytest_accel.leases.demand import LostMachineError, MachineDemand, RemoteDevicesError, UnfitDevicesError
from pytest_accel.leases.shared_folder import LockFolderError
from pytest_accel.settings.options import Settings

_INVENTORY_TIMEOUT = 60.0
"""Seconds in which an agent must look up the devices of a kind: a driver may take some to initialise many of them. The
connection to an agent that is stopped (SIGSTOP) stays open, so its end is not enough."""

# Driver to agent


class UseSettings(Struct, frozen=True):
    """Lease devices by these settings of the session."""

    settings: Settings


class InventoryRequest(Struct, frozen=True):
    """Ask for the inventory of a device kind."""

    kind: str
    settings: Settings
    """The session's settings."""


class RequestLease(Struct, frozen=True):
    """Request a lease."""

    demand: MachineDemand


class LeaseReturn(Struct, frozen=True):
    """Return a lease, or cancel a request that still waits."""

    number: int
    killed: bool


class LeaseUsers(Struct, frozen=True):
    """Tell which processes of the agent's machine use a lease."""

    number: int
    pids: tuple[int, ...]


# Agent to driver


class InventoryReply(Struct, frozen=True):
    """The answer to :class:`InventoryRequest`."""

    kind: str
    inventory: Inventory | None
    error: str = ""
    """The reason if there is no inventory."""


class LeaseGranted(Struct, frozen=True):
    """The answer to a :class:`RequestLease` whose demand has this number, which is now the lease's."""

    number: int
    devices: tuple[Device, ...]


class LeaseFailed(Struct, frozen=True):
    """The other answer to a :class:`RequestLease`: an error."""

    number: int
    text: str
    unfit: bool = False
    """True if the machine's devices do not meet the need, so that another machine may be tried."""


class LeaseWanted(Struct, frozen=True):
    """Another request waits for the devices of a lease."""

    number: int


class LeaseLost(Struct, frozen=True):
    """The lock of a device of a lease was lost, and another session may have the device."""

    number: int
    why: str


class RemoteLeases:
    """The driver's side: the :class:`~pytest_accel.leases.demand.LeaseSource` of one other machine.

    Callbacks are called in a thread of this object, not in the thread that receives messages: the pool may hold its
    lock while it waits for that thread.
    """

    slots = 0
    """CPU slots are leased on the controller's machine only."""

    def __init__(self, name: str, send: Callable[[object], None]) -> None:
        """`name` is the machine's name; `send` sends a message to the agent."""
        self.on_wanted: Callable[[int], None] = _ignore
        """Called with the number of a lease for whose devices another request waits."""
        self.on_lost: Callable[[int, str], None] = _ignore
        """Called with the number of a lease whose lock was lost, and the reason."""
        self.on_failure: Callable[[str], None] = _ignore
        """Called with the traceback of an error that has ended this object's thread."""
        self.name = name
        self._send = send
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        """Notified when an inventory has arrived or the agent is lost."""
        self._lost = False
        self._last_number = 0
        self._waiting: dict[int, Callable[[tuple[Device, ...] | Exception], None]] = {}
        self._inventories: dict[str, InventoryReply] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

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

    def submit(self, demand: MachineDemand, answer: Callable[[tuple[Device, ...] | Exception], None]) -> None:
        with self._lock:
            self._waiting[demand.number] = answer
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="accel-remote-leases", daemon=True)
                self._thread.start()
        self._send(RequestLease(demand))
        if self._lost:
            self.lose()

    def cancel(self, number: int) -> bool:
        with self._lock:
            self._waiting.pop(number, None)
        self._send(LeaseReturn(number, killed=False))
        return True

    def obstacles(self, number: int) -> list[str] | None:
        return []  # Only the agent knows them.

    def unavailable(self, demand: MachineDemand) -> str | None:
        return None

    def pass_on(self, lease: int, request: int) -> bool:
        return False

    def describe(self, number: int, *, pids: Sequence[int] | None = None, test: str | None = None) -> None:
        if pids is not None:
            self._send(LeaseUsers(number, tuple(pids)))

    def give_back(self, number: int, *, killed: bool) -> None:
        self._send(LeaseReturn(number, killed))

    def handle(self, message: object) -> None:
        """Handle a message of the agent."""
        if isinstance(message, InventoryReply):
            with self._answered:
                self._inventories[message.kind] = message
                self._answered.notify_all()
        elif isinstance(message, (LeaseGranted, LeaseFailed)):
            with self._lock:
                answer = self._waiting.pop(message.number, None)
            if answer is not None and isinstance(message, LeaseGranted):
                self._calls.put(partial(answer, message.devices))
            elif answer is not None and isinstance(message, LeaseFailed):
                error = UnfitDevicesError if message.unfit else RemoteDevicesError
                self._calls.put(partial(answer, error(f"{message.text} (on {self.name})")))
        elif isinstance(message, LeaseWanted):
            self._calls.put(partial(self.on_wanted, message.number))
        elif isinstance(message, LeaseLost):
            self._calls.put(partial(self.on_lost, message.number, f"{message.why} (on {self.name})"))

    def lose(self) -> None:
        """Fail all waiting requests, since the connection to the machine or its agent is lost."""
        with self._answered:
            self._lost = True
            self._answered.notify_all()
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            self._calls.put(partial(answer, LostMachineError(f"the machine {self.name} is lost")))

    def _run(self) -> None:
        try:
            while True:
                self._calls.get()()
        except BaseException:
            what = f"the thread that leases devices of {self.name} has ended with an error"
            self.on_failure(f"{what}:\n{format_exc()}")


class LeaseAgent:
    """The agent's side: takes leases on its machine for the driver. :meth:`handle` is called in one thread only.

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


def _ignore(*values: object) -> None:
    pass
