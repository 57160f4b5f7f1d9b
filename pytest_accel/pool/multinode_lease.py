"""Devices of several machines for one world.

They are asked for one machine after the other, in an order that all sessions share: so of two sessions that want the
same machines, the one that has the first gets the others too, and they do not wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from pytest_accel.core.device import DeviceNeed
from pytest_accel.leases.allocator import Supply
from pytest_accel.leases.lease_table import Lease
from pytest_accel.leases.locks import Holder


class Source(Protocol):
    """The devices of one machine."""

    def submit(
        self,
        kind: str,
        need: DeviceNeed,
        holder: Holder,
        on_grant: Callable[[Any], None],
        on_failure: Callable[[Exception], None],
    ) -> int:
        """Ask for a lease, as at a :class:`Supply`; the request's number."""

    def cancel(self, kind: str, request: int) -> None:
        """Withdraw a request, if it still waits."""

    def give_back(self, kind: str, lease: Any, *, killed: bool) -> None:
        """The processes that used a lease are gone, or there were none."""


class Near:
    """Those of the driver's machine."""

    def __init__(self, supply: Supply) -> None:
        self._supply = supply
        self.submit = supply.submit

    def cancel(self, kind: str, request: int) -> None:
        """As :class:`Source` says."""
        self._supply.broker(kind).cancel(request)

    def give_back(self, kind: str, lease: Lease, *, killed: bool) -> None:
        """As :class:`Source` says."""
        self._supply.give_back(kind, lease, killed=killed)


class Part(NamedTuple):
    """What is wanted of one machine."""

    node: int
    source: Source
    need: DeviceNeed


class Gang:
    """A request for the devices of several machines."""

    def __init__(
        self,
        lock: threading.RLock,
        kind: str,
        parts: Sequence[Part],
        holder: Holder,
        on_grant: Callable[[dict[int, Any]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """`parts` are in the order of which this module speaks. `on_grant` gets the leases by machine.

        `lock` is the owner's, and held whenever something is called here or there.
        """
        self._lock = lock
        self._kind = kind
        self._parts = parts
        self._holder = holder
        self._on_grant = on_grant
        self._on_failure = on_failure
        self._leases: dict[int, Any] = {}
        self._waiting: tuple[Source, int] | None = None
        self._over = False

    def ask(self) -> None:
        """For the devices of the next machine."""
        if len(self._leases) == len(self._parts):
            self._over = True
            self._on_grant(self._leases)
            return
        have = len(self._leases)
        part = self._parts[have]
        granted = partial(self._granted, part)
        try:
            request = part.source.submit(self._kind, part.need, self._holder, granted, self._failed)
        except Exception as error:  # Else the leases of the other machines would stay taken.
            self._failed(error)
            return
        if len(self._leases) == have:  # Else it has been granted at once.
            self._waiting = part.source, request

    @property
    def waiting(self) -> tuple[int, DeviceNeed, int | None]:
        """The machine whose devices it waits for, what it needs of them, and the request's number (None: none yet)."""
        part = self._parts[min(len(self._leases), len(self._parts) - 1)]
        return part.node, part.need, None if self._waiting is None else self._waiting[1]

    def cancel(self) -> None:
        """Nobody wants them any more: give back what there is."""
        if self._over:
            return
        self._over = True
        if self._waiting is not None:
            source, request = self._waiting
            source.cancel(self._kind, request)
        for part in self._parts:
            if part.node in self._leases:
                part.source.give_back(self._kind, self._leases[part.node], killed=False)

    def _granted(self, part: Part, lease: Any) -> None:
        with self._lock:
            if self._over:
                part.source.give_back(self._kind, lease, killed=False)
                return
            self._leases[part.node] = lease
            self._waiting = None
            self.ask()

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if not self._over:
                self._waiting = None
                self.cancel()
                self._on_failure(error)
