"""Leases on devices of another machine, as the pool requests them of an agent there, which takes the locks there."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from traceback import format_exc

from pytest_accel.core import threads
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
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.leases.demand import LostMachineError, MachineDemand, RemoteDevicesError, UnfitDevicesError
from pytest_accel.settings.options import Settings

_INVENTORY_TIMEOUT = 60.0
"""Seconds in which an agent must look up the devices of a kind: a driver may take some to initialise many of them. The
connection to an agent that is stopped (SIGSTOP) stays open, so its end is not enough."""


class RemoteLeases:
    """The :class:`~pytest_accel.leases.demand.LeaseSource` of one other machine, in the driver.

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
                self._thread = threads.start(self._run, "accel-remote-leases")
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

    def pass_on(self, lease: int, request: int | None) -> bool:
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


def _ignore(*values: object) -> None:
    pass
