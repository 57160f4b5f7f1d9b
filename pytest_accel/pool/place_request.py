"""Requests for a place on a cluster, and then for the leases of the devices in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.holder import Holder
from pytest_accel.pool.lease_request import CombinedLeaseRequest
from pytest_accel.pool.node_lease import NodeLease, NodeRequest, UnfitNodeError
from pytest_accel.pool.placement import Cluster, Place, PlaceError


class PlaceRequest:
    """A request for a place and the leases of its devices: granted as a whole, or not at all.

    If a node's devices do not meet the need, a place without that node is requested.

    It waits for the cluster until `place` is set, then for the leases, and is done after that. The pool uses it like a
    :class:`CombinedLeaseRequest`, except that it cannot take over a lease.
    """

    unavailable = None
    """Always None: only the cluster knows what it can never provide."""

    def __init__(
        self,
        lock: threading.RLock,
        cluster: Cluster,
        key: WorldKey,
        holder: Holder,
        node_requests: Callable[[Place], Sequence[NodeRequest]],
        on_grant: Callable[[dict[int, NodeLease], Place], None],
        on_wait: Callable[[], None],
        on_failure: Callable[[Exception], None],
        unfit_nodes: dict[int, str],
    ) -> None:
        """`unfit_nodes` has the nodes whose devices do not meet the need, each with the reason; the request adds to it.

        `node_requests` returns the requests for the devices of a place, in the order in which they are submitted.

        `on_wait` is called when it becomes known why the request waits for a place, and when that changes. `lock` is
        the pool's lock: callers of the methods hold it, and the callbacks are called with it held.
        """
        self.place: Place | None = None
        """The place, once the cluster has reserved it."""
        self.wait_reason = ""
        """Why the request waits for a place; empty: it may get one at once."""
        self._lock = lock
        self._cluster = cluster
        self._key = key
        self._holder = holder
        self._node_requests = node_requests
        self._on_grant = on_grant
        self._on_wait = on_wait
        self._on_failure = on_failure
        self._unfit_nodes = unfit_nodes
        self._avoided: frozenset[int] = frozenset()
        """The nodes that the submitted request avoids. Other requests may have found more since then."""
        self._request_id = 0
        """The id of the request at the cluster, once it is submitted."""
        self._leases: CombinedLeaseRequest | None = None
        self._done = False

    @property
    def is_placing(self) -> bool:
        """True if the request waits for the cluster."""
        return self.place is None and not self._done

    def submit(self) -> None:
        """Request the place."""
        self._avoided = frozenset(self._unfit_nodes)
        callbacks = self._placed, self._waits, self._failed
        self._request_id = self._cluster.place(self._key, *callbacks, self._avoided)

    def waiting(self) -> str | None:
        """Return a line with the test and what it waits for; None if it is not known to wait."""
        if self._leases is not None:
            return self._leases.waiting()
        if self._done or not self.wait_reason:
            return None
        return f"{self._holder.test} waits for a place on the cluster: {self.wait_reason}"

    def cancel_if_waiting(self) -> list[str] | None:
        """Cancel a request that waits and return why it has waited; otherwise do nothing and return None."""
        if self._leases is None:
            reasons = filter(None, (*self._unfit_nodes.values(), self.wait_reason))
            obstacles = None if self._done else list(reasons)
        else:
            obstacles = self._leases.cancel_if_waiting()
        if obstacles is not None:
            self.cancel()
        return obstacles

    def cancel(self) -> None:
        """Cancel the request and give back what was granted so far. No-op after the grant or a failure."""
        if self._done:
            return
        self._done = True
        if self._leases is not None:
            self._leases.cancel()
        if self.place is None:
            self._cluster.cancel(self._request_id)
        else:
            self._cluster.release(self.place)

    # Callbacks of the cluster, in its threads

    def _waits(self, why: str) -> None:
        with self._lock:
            if self.is_placing:
                self.wait_reason = why
                self._on_wait()

    def _placed(self, place: Place) -> None:
        with self._lock:
            if self._done:
                self._cluster.release(place)
                return
            self.place = place
            try:
                parts = self._node_requests(place)
                self._leases = CombinedLeaseRequest(self._lock, parts, self._holder, self._granted, self._failed)
                self._leases.submit()
            except Exception as error:  # Without this, the driver would wait forever.
                self._failed(error)

    # Callbacks of the leases

    def _granted(self, leases: dict[int, NodeLease]) -> None:
        assert self.place is not None
        self._done = True
        self._on_grant(leases, self.place)

    def _failed(self, error: Exception) -> None:
        """Fail, since the cluster or a node has failed; or request another place, since the devices are unfit."""
        with self._lock:
            if self._done:
                return
            place, self.place = self.place, None
            if place is not None:
                self._cluster.release(place)
            if isinstance(error, UnfitNodeError) and error.node not in self._avoided:
                self._unfit_nodes[error.node] = str(error)
                self._leases, self.wait_reason = None, ""
                self.submit()
                return
            self._done = True
            if isinstance(error, PlaceError):
                error = PlaceError("\n".join([*self._unfit_nodes.values(), str(error)]))
            self._on_failure(error)
