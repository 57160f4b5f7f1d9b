"""Requests for a place on a cluster, and then for the leases of the devices in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pytest_accel.leases.demand import UnfitDevicesError, WorldDemand
from pytest_accel.pool.lease_request import LeaseRequest, MachineLease
from pytest_accel.pool.placement import Cluster, Place, PlaceError


class PlaceRequest:
    """A request for a place and the leases of its devices: granted as a whole, or not at all.

    If a machine's devices do not meet the need, a place without that machine is requested.

    It waits for the cluster until `place` is set, then for the leases, and is done after that. The pool uses it like a
    :class:`LeaseRequest`, except that it cannot take over a lease.
    """

    unavailable = None
    """Always None: only the cluster knows what it can never provide."""

    def __init__(
        self,
        lock: threading.RLock,
        cluster: Cluster,
        demand: WorldDemand,
        parts: Callable[[Place], Sequence[MachineLease]],
        on_grant: Callable[[dict[int, MachineLease], Place], None],
        on_wait: Callable[[], None],
        on_failure: Callable[[Exception], None],
        unfit: dict[int, str],
    ) -> None:
        """`unfit` has the machines whose devices do not meet the need, each with the reason; the request adds to it.

        `parts` returns what to lease in a place, in the order in which it is requested.

        `on_wait` is called when it becomes known why the request waits for a place, and when that changes. `lock` is
        the pool's lock: callers of the methods hold it, and the callbacks are called with it held.
        """
        self.place: Place | None = None
        """The place, once the cluster has reserved it."""
        self.wait_reason = ""
        """Why the request waits for a place; empty: it may get one at once."""
        self._lock = lock
        self._cluster = cluster
        self._demand = demand
        self._parts = parts
        self._on_grant = on_grant
        self._on_wait = on_wait
        self._on_failure = on_failure
        self._unfit = unfit
        self._avoided: frozenset[int] = frozenset()
        """The machines that the submitted request avoids. Other requests may have found more since then."""
        self._request_id = 0
        """The id of the request at the cluster, once it is submitted."""
        self._leases: LeaseRequest | None = None
        self._done = False

    @property
    def is_placing(self) -> bool:
        """True if the request waits for the cluster."""
        return self.place is None and not self._done

    def submit(self) -> None:
        """Request the place."""
        self._avoided = frozenset(self._unfit)
        callbacks = self._placed, self._waits, self._failed
        self._request_id = self._cluster.place(self._demand.key, *callbacks, self._avoided)

    def waiting(self) -> str | None:
        """Return a line with the test and what it waits for; None if it is not known to wait."""
        if self._leases is not None:
            return self._leases.waiting()
        if self._done or not self.wait_reason:
            return None
        return f"{self._demand.holder.test} waits for a place on the cluster: {self.wait_reason}"

    def cancel_if_waiting(self) -> list[str] | None:
        """Cancel a request that waits and return why it has waited; otherwise do nothing and return None."""
        if self._leases is None:
            reasons = filter(None, (*self._unfit.values(), self.wait_reason))
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
                self._leases = LeaseRequest(self._lock, self._parts(place), self._granted, self._failed)
                self._leases.submit()
            except Exception as error:  # Without this, the driver would wait forever.
                self._failed(error)

    # Callbacks of the leases

    def _granted(self, leases: dict[int, MachineLease]) -> None:
        assert self.place is not None
        self._done = True
        self._on_grant(leases, self.place)

    def _failed(self, error: Exception) -> None:
        """Fail, since the cluster or a machine has failed; or request another place, since the devices are unfit."""
        with self._lock:
            if self._done:
                return
            place, self.place = self.place, None
            if place is not None:
                self._cluster.release(place)
            part = None if self._leases is None else self._leases.failed
            if isinstance(error, UnfitDevicesError) and part is not None and part.machine not in self._avoided:
                self._unfit[part.machine] = str(error)
                self._leases, self.wait_reason = None, ""
                self.submit()
                return
            self._done = True
            if isinstance(error, PlaceError):
                error = PlaceError("\n".join([*self._unfit.values(), str(error)]))
            self._on_failure(error)
