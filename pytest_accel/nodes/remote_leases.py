"""The devices of another machine: a keeper leases them there, with that machine's locks, for this session's worlds."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from traceback import format_exc
from typing import Any

import psutil

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.hardware.inventory import Inventory, Machine
from pytest_accel.leases.allocator import Supply
from pytest_accel.leases.lease_table import Lease
from pytest_accel.leases.lock_dir import LockFolderError
from pytest_accel.leases.locks import Holder

# Driver to keeper


@dataclass(frozen=True, slots=True)
class Look:
    """What devices of a kind are there?"""

    kind: str
    settings: object
    """The session's."""


@dataclass(frozen=True, slots=True)
class Ask:
    number: int
    """By which both sides know the request, and the lease that comes of it."""
    kind: str
    need: DeviceNeed
    holder: Holder


@dataclass(frozen=True, slots=True)
class GiveBack:
    """A lease, or a request that still waits."""

    number: int
    killed: bool


@dataclass(frozen=True, slots=True)
class Describe:
    """Which processes of that machine use a lease."""

    number: int
    pids: tuple[int, ...]


# Keeper to driver


@dataclass(frozen=True, slots=True)
class Seen:
    kind: str
    inventory: Inventory | None
    error: str = ""
    """Why there is no inventory."""


@dataclass(frozen=True, slots=True)
class FarLease:
    """The answer to a request."""

    number: int
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class LeaseWanted:
    """Somebody waits for what a lease holds."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The lock of a device of a lease was lost, and another session may have the device."""

    number: int
    why: str


class FarSupplyError(Exception):
    """The devices of another machine cannot be had; the message says why."""


class FarSupply:
    """The driver's side. Callbacks come in a thread of its own, since the owner may wait for the bridge meanwhile."""

    def __init__(self, name: str, send: Callable[[object], None]) -> None:
        """`name` is the machine's; `send` takes what is for the keeper."""
        self.on_wanted: Callable[[int], None] = _ignore
        """Gets the number of a lease for which somebody waits."""
        self.on_lost: Callable[[int, str], None] = _ignore
        """Gets the number of a lease whose lock was lost, and how."""
        self.on_failure: Callable[[str], None] = _ignore
        """Gets the traceback of an error that has ended this object's thread."""
        self.name = name
        self._send = send
        self._lock = threading.Lock()
        self._lost = False
        self._numbers = 0
        self._waiting: dict[int, tuple[Callable[[FarLease], None], Callable[[Exception], None]]] = {}
        self._seen: dict[str, Seen] = {}
        self._looks: queue.SimpleQueue[Seen] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def inventory(self, kind: str, settings: object) -> Inventory:
        """What is there of a kind, by the session's settings; :class:`FarSupplyError` where that is not known."""
        if kind not in self._seen:
            self._send(Look(kind, settings))
            self._seen[kind] = Seen(kind, None, "it is lost") if self._lost else self._looks.get()
        seen = self._seen[kind]
        if seen.inventory is None:
            raise FarSupplyError(f"the {kind} devices of {self.name} cannot be looked up: {seen.error}")
        return seen.inventory

    def submit(
        self,
        kind: str,
        need: DeviceNeed,
        holder: Holder,
        on_grant: Callable[[FarLease], None],
        on_failure: Callable[[Exception], None],
    ) -> int:
        """As a :class:`Supply`'s."""
        with self._lock:
            self._numbers += 1
            number = self._numbers
            self._waiting[number] = on_grant, on_failure
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="accel-far-supply", daemon=True)
                self._thread.start()
        self._send(Ask(number, kind, need, holder))
        if self._lost:
            self.lose()
        return number

    def cancel(self, kind: str, request: int) -> None:
        """Withdraw a request, if it still waits."""
        with self._lock:
            self._waiting.pop(request, None)
        self._send(GiveBack(request, killed=False))

    def give_back(self, kind: str, lease: FarLease, *, killed: bool) -> None:
        """As a :class:`Supply`'s."""
        self._send(GiveBack(lease.number, killed))

    def describe(self, lease: FarLease, pids: tuple[int, ...]) -> None:
        """Processes of that machine use the lease."""
        self._send(Describe(lease.number, pids))

    def take(self, message: object) -> bool:
        """What the keeper says; whether it is for this object."""
        if isinstance(message, Seen):
            self._looks.put(message)
        elif isinstance(message, (FarLease, Failed)):
            with self._lock:
                waiting = self._waiting.pop(message.number, None)
            if waiting is not None and isinstance(message, FarLease):
                self._calls.put(partial(waiting[0], message))
            elif waiting is not None and isinstance(message, Failed):
                self._calls.put(partial(waiting[1], FarSupplyError(f"{message.text} (on {self.name})")))
            elif isinstance(message, FarLease):
                self._send(GiveBack(message.number, killed=False))  # It was withdrawn when it was on its way.
        elif isinstance(message, LeaseWanted):
            self._calls.put(partial(self.on_wanted, message.number))
        elif isinstance(message, LeaseLost):
            self._calls.put(partial(self.on_lost, message.number, f"{message.why} (on {self.name})"))
        else:
            return False
        return True

    def lose(self) -> None:
        """The machine, or its keeper, is lost: nobody waits for it any more."""
        self._lost = True
        self._looks.put(Seen("", None, "it is lost"))
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for _, on_failure in waiting.values():
            self._calls.put(partial(on_failure, FarSupplyError(f"the node {self.name} is lost")))

    def _run(self) -> None:
        try:
            while True:
                self._calls.get()()
        except BaseException:
            what = f"the thread that leases devices of {self.name} has ended with an error"
            self.on_failure(f"{what}:\n{format_exc()}")


class Agent:
    """The keeper's side. :meth:`take` is called in one thread."""

    def __init__(self, send: Callable[[object], None], make_machine: Callable[[Any], Machine]) -> None:
        """`make_machine` looks at the machine as the session's settings say."""
        self._send = send
        self._make_machine = make_machine
        self._machine: Machine | None = None
        self._supply: Supply | None = None
        self._requests: dict[int, tuple[str, int]] = {}
        """Kind and the broker's number."""
        self._leases: dict[int, tuple[str, Lease]] = {}

    def take(self, message: object) -> None:
        """What the driver wants of the machine's devices."""
        if isinstance(message, Look):
            self._look(message)
        elif self._machine is None or self._supply is None:
            return
        elif isinstance(message, Ask):
            self._ask(message, self._supply, self._machine)
        elif isinstance(message, GiveBack):
            kind, request = self._requests.pop(message.number, ("", 0))
            if message.number in self._leases:
                kind, lease = self._leases.pop(message.number)
                self._supply.give_back(kind, lease, killed=message.killed)
            elif kind:
                self._supply.broker(kind).cancel(request)
        elif isinstance(message, Describe) and message.number in self._leases:
            kind, lease = self._leases[message.number]
            processes = []
            for pid in message.pids:
                with contextlib.suppress(psutil.Error):  # It has died already, and cannot be using a device.
                    processes.append((pid, psutil.Process(pid).create_time()))
            with contextlib.suppress(LockFolderError):  # As where the disk is full: the lock itself is held.
                self._supply.broker(kind).describe(lease.id, processes=processes)

    def close(self) -> None:
        """Give all leases back."""
        if self._supply is not None:
            self._supply.close()

    def _look(self, message: Look) -> None:
        try:
            if self._machine is None:
                machine = self._make_machine(message.settings)
                waits = getattr(message.settings, "busy", None) == "wait"
                self._supply = Supply(machine, 1, self._wanted, self._lost, waits_for_busy=waits)
                self._machine = machine
            self._send(Seen(message.kind, self._machine.of(message.kind)))
        except Exception as error:
            self._send(Seen(message.kind, None, str(error)))

    def _ask(self, message: Ask, supply: Supply, machine: Machine) -> None:
        by_id = {device.id: device for device in machine.of(message.kind).devices}

        def grant(lease: Lease) -> None:
            self._leases[message.number] = message.kind, lease
            self._send(FarLease(message.number, tuple(by_id[name] for name in lease.devices)))

        def fail(error: Exception) -> None:
            self._send(Failed(message.number, str(error)))

        # The lock file tells other sessions of that machine which process there it is.
        holder = replace(message.holder, pid=os.getpid())
        try:
            request = supply.submit(message.kind, message.need, holder, grant, fail)
        except Exception as error:
            fail(error)
        else:
            self._requests[message.number] = message.kind, request

    def _wanted(self, kind: str | None, lease: int) -> None:
        for number in self._numbers_of(kind, lease):
            self._send(LeaseWanted(number))

    def _lost(self, kind: str | None, lease: int, why: str) -> None:
        for number in self._numbers_of(kind, lease):
            self._send(LeaseLost(number, why))

    def _numbers_of(self, kind: str | None, lease: int) -> list[int]:
        return [number for number, (its_kind, one) in list(self._leases.items()) if (its_kind, one.id) == (kind, lease)]


def _ignore(*values: object) -> None:
    pass
