"""Requests for all the leases that one world needs.

The devices of several nodes are requested one node after the other, in an order that is the same in all sessions. This
prevents deadlocks: of two sessions that need the same nodes, the one that gets the first node also gets the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from pytest_accel.leases.holder import Holder
from pytest_accel.pool.node_lease import NodeLease, NodeRequest


class CombinedLeaseRequest:
    """A request for leases of one or more nodes: granted as a whole, or not at all."""

    def __init__(
        self,
        lock: threading.RLock,
        parts: Sequence[NodeRequest],
        holder: Holder,
        on_grant: Callable[[dict[int, NodeLease]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Take the `parts` in the order in which they are submitted, see the module's docstring.

        `on_grant` gets the leases by node number. `lock` is the pool's lock: callers of the methods hold it, and the
        callbacks are called with it held.
        """
        self._lock = lock
        self._parts = parts
        self._holder = holder
        self._on_grant = on_grant
        self._on_failure = on_failure
        self._leases: dict[int, NodeLease] = {}
        self._waiting: NodeRequest | None = None
        """The part that has been submitted and not granted."""
        self._done = False

    @property
    def unavailable(self) -> str | None:
        """Why the request can never be granted, or None."""
        return next((why for part in self._parts if (why := part.unavailable) is not None), None)

    def submit(self) -> None:
        """Request the lease of the next node, or report the grant if all nodes have granted theirs."""
        if len(self._leases) == len(self._parts):
            self._done = True
            self._on_grant(self._leases)
            return
        granted_before = len(self._leases)
        part = self._parts[granted_before]
        try:
            part.submit(self._holder, partial(self._granted, part), self._failed)
        except Exception as error:  # Without this, the leases of the other nodes would never be returned.
            self._failed(error)
            return
        if len(self._leases) == granted_before and not self._done:  # Otherwise a callback has been called already.
            self._waiting = part

    def waiting(self) -> str | None:
        """Return a line with the test, what it waits for and who holds that; None if the request does not wait."""
        obstacles = None if self._waiting is None else self._waiting.obstacles()
        if self._waiting is None or obstacles is None:
            return None
        waits = f"{self._holder.test} waits for {self._waiting.what}"
        return ": ".join(filter(None, (waits, "; ".join(obstacles))))

    def cancel_if_waiting(self) -> list[str] | None:
        """Cancel a request that waits and return why it has waited; otherwise do nothing and return None."""
        obstacles = None if self._waiting is None else self._waiting.obstacles()
        if self._waiting is None or obstacles is None or not self._waiting.cancel():
            return None
        self._waiting = None
        self.cancel()
        return obstacles

    def take_over(self, lease: NodeLease) -> bool:
        """Take `lease` from its holder, without a call of `on_grant`; return True if done.

        This is possible only if the request is for this one lease, and first in the queue.
        """
        if len(self._parts) > 1 or self._waiting is None or not self._waiting.take_over(lease):
            return False
        self._done, self._waiting = True, None
        return True

    def cancel(self) -> None:
        """Cancel the request and give back the leases granted so far. No-op after the grant or a failure."""
        if self._done:
            return
        self._done = True
        if self._waiting is not None:
            self._waiting.cancel()
        for lease in self._leases.values():
            lease.give_back()

    def _granted(self, part: NodeRequest, lease: NodeLease) -> None:
        with self._lock:
            if self._done:
                lease.give_back()
                return
            self._leases[part.node] = lease
            self._waiting = None
            self.submit()

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if not self._done:
                self._waiting = None
                self.cancel()
                self._on_failure(error)
