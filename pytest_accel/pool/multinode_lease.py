"""Requests for the devices of several nodes for one world.

The devices are requested one node after the other, in an order that is the same in all sessions. This prevents
deadlocks: of two sessions that need the same nodes, the one that gets the first node also gets the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from pytest_accel.core.device import DeviceNeed
from pytest_accel.leases.allocator import Allocator
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.lease_table import Lease


class DeviceSource(Protocol):
    """The devices of one node."""

    def submit(
        self,
        kind: str,
        need: DeviceNeed,
        holder: Holder,
        on_grant: Callable[[Any], None],
        on_failure: Callable[[Exception], None],
    ) -> int:
        """Request a lease, as with :meth:`Allocator.submit`; return the number of the request."""

    def cancel(self, kind: str, request: int) -> None:
        """Withdraw a request, if it still waits."""

    def give_back(self, kind: str, lease: Any, *, killed: bool) -> None:
        """Return a lease that no process uses any more; `killed` if the processes that used it were killed."""


class LocalSource:
    """The devices of the controller's own node, from its :class:`Allocator`."""

    def __init__(self, supply: Allocator) -> None:
        self._supply = supply
        self.submit = supply.submit

    def cancel(self, kind: str, request: int) -> None:
        """Withdraw a request, if it still waits."""
        self._supply.broker(kind).cancel(request)

    def give_back(self, kind: str, lease: Lease, *, killed: bool) -> None:
        """Return a lease that no process uses any more; `killed` if the processes that used it were killed."""
        self._supply.give_back(kind, lease, killed=killed)


class NodeNeed(NamedTuple):
    """The devices that a request needs of one node."""

    node: int
    source: DeviceSource
    need: DeviceNeed


class MultiNodeRequest:
    """A request for the devices of several nodes: granted as a whole, or not at all."""

    def __init__(
        self,
        lock: threading.RLock,
        kind: str,
        node_needs: Sequence[NodeNeed],
        holder: Holder,
        on_grant: Callable[[dict[int, Any]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Take `node_needs` in the order of the requests, see the module's docstring; :meth:`submit` begins.

        `on_grant` gets the leases by node number. `lock` is the pool's lock: callers of the methods hold it, and the
        callbacks are called with it held.
        """
        self._lock = lock
        self._kind = kind
        self._node_needs = node_needs
        self._holder = holder
        self._on_grant = on_grant
        self._on_failure = on_failure
        self._leases: dict[int, Any] = {}
        self._waiting: tuple[DeviceSource, int] | None = None
        self._done = False

    def submit(self) -> None:
        """Request the devices of the next node, or report the grant if all nodes have granted theirs."""
        if len(self._leases) == len(self._node_needs):
            self._done = True
            self._on_grant(self._leases)
            return
        granted_before = len(self._leases)
        entry = self._node_needs[granted_before]
        granted = partial(self._granted, entry)
        try:
            request = entry.source.submit(self._kind, entry.need, self._holder, granted, self._failed)
        except Exception as error:  # Without this, the leases of the other nodes would never be returned.
            self._failed(error)
            return
        if len(self._leases) == granted_before:  # Otherwise `submit` has already called `granted`.
            self._waiting = entry.source, request

    @property
    def waiting(self) -> tuple[int, DeviceNeed, int | None]:
        """The node whose devices are awaited, the need, and the request's number (None if it has none yet)."""
        entry = self._node_needs[min(len(self._leases), len(self._node_needs) - 1)]
        return entry.node, entry.need, None if self._waiting is None else self._waiting[1]

    def cancel(self) -> None:
        """Withdraw the request and return the leases granted so far. No-op after the grant or a failure."""
        if self._done:
            return
        self._done = True
        if self._waiting is not None:
            source, request = self._waiting
            source.cancel(self._kind, request)
        for entry in self._node_needs:
            if entry.node in self._leases:
                entry.source.give_back(self._kind, self._leases[entry.node], killed=False)

    def _granted(self, entry: NodeNeed, lease: Any) -> None:
        with self._lock:
            if self._done:
                entry.source.give_back(self._kind, lease, killed=False)
                return
            self._leases[entry.node] = lease
            self._waiting = None
            self.submit()

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if not self._done:
                self._waiting = None
                self.cancel()
                self._on_failure(error)
