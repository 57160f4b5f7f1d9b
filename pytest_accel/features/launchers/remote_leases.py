"""Leases on devices of another node: an agent there takes them, with that node's locks, for this session's worlds."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from traceback import format_exc

import psutil
from msgspec import Struct

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.kinds import PJRT_DEVICE
from pytest_accel.hardware.inventory import Inventory, Machine
from pytest_accel.hardware.matching import shortfall
from pytest_accel.leases.allocator import Allocator
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.lease_table import Lease
from pytest_accel.leases.lock_dir import LockFolderError
from pytest_accel.pool.placement import LostNodeError, RemoteDevicesError, UnfitDevicesError
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


class LeaseRequest(Struct, frozen=True):
    """Request a lease."""

    number: int
    """Identifies the request, and then the lease, on both sides."""
    kind: str
    need: DeviceNeed
    holder: Holder
    mask: str | None = None
    """Mask that shows only the devices to lease, as a process without a mask numbers them; None: any devices."""


class LeaseReturn(Struct, frozen=True):
    """Return a lease, or cancel a request that still waits."""

    number: int
    killed: bool


class LeaseUsers(Struct, frozen=True):
    """Tell which processes of the agent's node use a lease."""

    number: int
    pids: tuple[int, ...]


# Agent to driver


class InventoryReply(Struct, frozen=True):
    """The answer to :class:`InventoryRequest`."""

    kind: str
    inventory: Inventory | None
    error: str = ""
    """The reason if there is no inventory."""


class RemoteLease(Struct, frozen=True):
    """A granted lease: the answer to the :class:`LeaseRequest` with the same number."""

    number: int
    devices: tuple[Device, ...]


class LeaseFailed(Struct, frozen=True):
    """The other answer to a :class:`LeaseRequest`: an error."""

    number: int
    text: str
    unfit: bool = False
    """True if the node's devices do not meet the need, so that another node may be tried."""


class LeaseWanted(Struct, frozen=True):
    """Another request waits for the devices of a lease."""

    number: int


class LeaseLost(Struct, frozen=True):
    """The lock of a device of a lease was lost, and another session may have the device."""

    number: int
    why: str


class RemoteLeases:
    """The driver's side: requests and leases on the devices of one other node.

    Callbacks are called in a thread of this object, not in the thread that receives messages: the pool may hold its
    lock while it waits for that thread.
    """

    def __init__(self, name: str, send: Callable[[object], None]) -> None:
        """`name` is the node's name; `send` sends a message to the agent."""
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
        self._waiting: dict[int, tuple[Callable[[RemoteLease], None], Callable[[Exception], None]]] = {}
        self._inventories: dict[str, InventoryReply] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def use(self, settings: Settings) -> None:
        """Have the agent lease devices by `settings`. Needed before the first lease if no inventory was requested."""
        self._send(UseSettings(settings))

    def inventory(self, kind: str, settings: Settings) -> Inventory:
        """Return the node's devices of `kind`; raise :class:`RemoteDevicesError` if they cannot be looked up."""
        if kind not in self._inventories:
            self._send(InventoryRequest(kind, settings))
            with self._answered:
                self._answered.wait_for(lambda: self._lost or kind in self._inventories, _INVENTORY_TIMEOUT)
                why = "the node is lost" if self._lost else f"its agent did not answer within {_INVENTORY_TIMEOUT:g} s"
                self._inventories.setdefault(kind, InventoryReply(kind, None, why))
        seen = self._inventories[kind]
        if seen.inventory is None:
            raise RemoteDevicesError(f"the {kind} devices of {self.name} cannot be looked up: {seen.error}")
        return seen.inventory

    def submit(
        self,
        kind: str,
        need: DeviceNeed,
        holder: Holder,
        on_grant: Callable[[RemoteLease], None],
        on_failure: Callable[[Exception], None],
        mask: str | None = None,
    ) -> int:
        """Request a lease; see :meth:`Allocator.submit`. `mask` is that of :class:`LeaseRequest`."""
        with self._lock:
            self._last_number += 1
            number = self._last_number
            self._waiting[number] = on_grant, on_failure
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="accel-remote-leases", daemon=True)
                self._thread.start()
        self._send(LeaseRequest(number, kind, need, holder, mask))
        if self._lost:
            self.lose()
        return number

    def cancel(self, request: int) -> None:
        """Cancel a request if it still waits."""
        with self._lock:
            self._waiting.pop(request, None)
        self._send(LeaseReturn(request, killed=False))

    def give_back(self, lease: RemoteLease, *, killed: bool) -> None:
        """Return a lease that no process uses any more; see :meth:`Allocator.give_back`."""
        self._send(LeaseReturn(lease.number, killed))

    def describe(self, lease: RemoteLease, pids: tuple[int, ...]) -> None:
        """Tell the agent which processes of its node use the lease."""
        self._send(LeaseUsers(lease.number, pids))

    def handle(self, message: object) -> None:
        """Handle a message of the agent."""
        if isinstance(message, InventoryReply):
            with self._answered:
                self._inventories[message.kind] = message
                self._answered.notify_all()
        elif isinstance(message, (RemoteLease, LeaseFailed)):
            with self._lock:
                waiting = self._waiting.pop(message.number, None)
            if waiting is not None and isinstance(message, RemoteLease):
                self._calls.put(partial(waiting[0], message))
            elif waiting is not None and isinstance(message, LeaseFailed):
                error = UnfitDevicesError if message.unfit else RemoteDevicesError
                self._calls.put(partial(waiting[1], error(f"{message.text} (on {self.name})")))
            elif isinstance(message, RemoteLease):
                self._send(LeaseReturn(message.number, killed=False))  # Granted before the cancellation arrived.
        elif isinstance(message, LeaseWanted):
            self._calls.put(partial(self.on_wanted, message.number))
        elif isinstance(message, LeaseLost):
            self._calls.put(partial(self.on_lost, message.number, f"{message.why} (on {self.name})"))

    def lose(self) -> None:
        """Fail all waiting requests, since the connection to the node or its agent is lost."""
        with self._answered:
            self._lost = True
            self._answered.notify_all()
            waiting, self._waiting = self._waiting, {}
        for _, on_failure in waiting.values():
            self._calls.put(partial(on_failure, LostNodeError(f"the node {self.name} is lost")))

    def _run(self) -> None:
        try:
            while True:
                self._calls.get()()
        except BaseException:
            what = f"the thread that leases devices of {self.name} has ended with an error"
            self.on_failure(f"{what}:\n{format_exc()}")


class LeaseAgent:
    """The agent's side: takes leases on its node for the driver. :meth:`handle` is called in one thread only."""

    def __init__(self, send: Callable[[object], None], make_machine: Callable[[Settings], Machine]) -> None:
        """`make_machine` makes the :class:`Machine` of this node from the session's settings."""
        self._send = send
        self._make_machine = make_machine
        self._machine: Machine | None = None
        self._allocator: Allocator | None = None
        self._unusable = "the session has not sent its settings"
        """Why no device can be leased, if there is no allocator."""
        self._requests: dict[int, tuple[str, int]] = {}
        """The kind of each request, and its number in the kind's broker, by the driver's number."""
        self._leases: dict[int, tuple[str, Lease]] = {}
        self._lock = threading.Lock()
        """Protects `_early` and the addition of leases: the broker calls back in several threads."""
        self._early: dict[tuple[str | None, int], list[Callable[[int], object]]] = {}
        """The notices about leases whose grant the broker has not reported yet, by the lease's kind and id there. Each
        is a function that makes the message from the driver's number."""

    def handle(self, message: object) -> None:
        """Handle a message of the driver."""
        if isinstance(message, UseSettings):
            try:
                self._prepare(message.settings)
            except Exception as error:
                self._unusable = str(error)
        elif isinstance(message, InventoryRequest):
            self._send_inventory(message)
        elif self._machine is None or self._allocator is None:
            if isinstance(message, LeaseRequest):
                self._send(LeaseFailed(message.number, self._unusable))
        elif isinstance(message, LeaseRequest):
            self._submit(message, self._allocator, self._machine)
        elif isinstance(message, LeaseReturn):
            kind, request = self._requests.pop(message.number, ("", 0))
            if message.number in self._leases:
                kind, lease = self._leases.pop(message.number)
                self._allocator.give_back(kind, lease, killed=message.killed)
            elif kind:
                self._allocator.broker(kind).cancel(request)
        elif isinstance(message, LeaseUsers) and message.number in self._leases:
            kind, lease = self._leases[message.number]
            processes = []
            for pid in message.pids:
                with contextlib.suppress(psutil.Error):  # The process has ended and uses no device.
                    processes.append((pid, psutil.Process(pid).create_time()))
            with contextlib.suppress(LockFolderError):  # For example a full disk; the lock itself is still held.
                self._allocator.broker(kind).describe(lease.id, processes=processes)

    def close(self) -> None:
        """Return all leases."""
        if self._allocator is not None:
            self._allocator.close()

    def _prepare(self, settings: Settings) -> Machine:
        """Return the machine, which the first settings describe."""
        if self._machine is None:
            machine = self._make_machine(settings)
            waits = settings.busy == "wait"
            self._allocator = Allocator(machine, 1, self._wanted, self._lost, waits_for_busy=waits)
            self._machine = machine
        return self._machine

    def _send_inventory(self, message: InventoryRequest) -> None:
        try:
            self._send(InventoryReply(message.kind, self._prepare(message.settings).of(message.kind)))
        except Exception as error:
            self._send(InventoryReply(message.kind, None, str(error)))

    def _submit(self, message: LeaseRequest, allocator: Allocator, machine: Machine) -> None:
        by_id: dict[str, Device] = {}

        def grant(lease: Lease) -> None:
            with self._lock:
                self._leases[message.number] = message.kind, lease
                notices = self._early.pop((message.kind, lease.id), [])
            self._send(RemoteLease(message.number, tuple(by_id[name] for name in lease.devices)))
            for notice in notices:
                self._send(notice(message.number))

        def fail(error: Exception) -> None:
            self._send(LeaseFailed(message.number, str(error), isinstance(error, UnfitDevicesError)))

        # The lock file must name a process of this node, for the other sessions here.
        holder = replace(message.holder, pid=os.getpid())
        try:
            by_id |= {device.id: device for device in machine.of(message.kind).devices}
            only = None if message.mask is None else _shown(message.mask, message.kind, message.need, machine)
            request = allocator.submit(message.kind, message.need, holder, grant, fail, only)
        except Exception as error:
            fail(error)
        else:
            self._requests[message.number] = message.kind, request

    def _wanted(self, kind: str | None, lease: int) -> None:
        self._notify(kind, lease, LeaseWanted)

    def _lost(self, kind: str | None, lease: int, why: str) -> None:
        self._notify(kind, lease, partial(LeaseLost, why=why))

    def _notify(self, kind: str | None, lease: int, notice: Callable[[int], object]) -> None:
        """Send the driver a notice about a lease; if its grant has not been reported yet, do so after that."""
        with self._lock:
            leases = list(self._leases.items())
            number = next((number for number, (its_kind, one) in leases if (its_kind, one.id) == (kind, lease)), None)
            if number is None:
                self._early.setdefault((kind, lease), []).append(notice)
        if number is not None:
            self._send(notice(number))


def _shown(mask: str, kind: str, need: DeviceNeed, machine: Machine) -> frozenset[str]:
    """Return the ids of the session's devices that `mask` shows.

    Raise :class:`UnfitDevicesError` if they do not suffice for `need`.
    """
    vendor, inventory = machine.vendor(kind), machine.of(kind)
    variable = next((name for name in vendor.mask_variables if name != PJRT_DEVICE), None)
    if variable is None:
        raise RemoteDevicesError(f"{kind} devices have no mask, by which a cluster could name them")
    # The other variables may set the order in which the mask counts devices (CUDA_DEVICE_ORDER).
    environ = {name: value for name, value in os.environ.items() if name not in vendor.mask_variables}
    names = {device.id for device in vendor.visible(vendor.discover(), {**environ, variable: mask})}
    devices = tuple(device for device in inventory.devices if device.id in names)
    missing = shortfall(need, replace(inventory, devices=devices))
    if missing is not None:
        raise UnfitDevicesError(f"the cluster has reserved {variable}={mask}, but the test {missing}")
    return frozenset(names)


def _ignore(*values: object) -> None:
    pass
