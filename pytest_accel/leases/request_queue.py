"""The requests of one session that wait for a lease, and their place among the requests of all sessions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from pytest_accel.leases.holder import Holder
from pytest_accel.leases.lease_table import Lease
from pytest_accel.leases.policy import Request, Shortage


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits, with its holder, arrival time, and the callbacks that answer it."""

    request: Request
    holder: Holder
    on_grant: Callable[[Lease], None]
    on_failure: Callable[[Exception], None]
    since: float
    """Seconds since the epoch: the arrival time that is compared with the requests of other sessions."""

    def is_behind(self, others: Mapping[str, float], devices: Iterable[str]) -> bool:
        """Return True if another session has waited longer for one of `devices`.

        `others` has the arrival time of the first request of other sessions for each device that they wait for.
        """
        return any(others.get(device, math.inf) < self.since for device in devices)


class RequestQueue:
    """The waiting requests of one session in the order of arrival. Owned by the broker. Not thread-safe.

    Arrival times increase strictly along the queue, even if the clock is set back. So no request of the session is
    overtaken by a later one because of what another session waits for.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, WaitingRequest] = {}
        self._last_arrival = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[Request]:
        """The requests in the order of arrival, as the policy takes them."""
        return [waiting.request for waiting in self._waiting.values()]

    @property
    def first(self) -> WaitingRequest | None:
        """The request that arrived first."""
        return next(iter(self._waiting.values()), None)

    def get(self, request_id: int) -> WaitingRequest | None:
        """Return a request that waits, or None."""
        return self._waiting.get(request_id)

    def add(
        self,
        request: Request,
        holder: Holder,
        on_grant: Callable[[Lease], None],
        on_failure: Callable[[Exception], None],
        arrival: float,
    ) -> None:
        """Append a request that arrived at `arrival`."""
        self._last_arrival = max(arrival, math.nextafter(self._last_arrival, math.inf))
        self._waiting[request.id] = WaitingRequest(request, holder, on_grant, on_failure, self._last_arrival)

    def pop(self, request_id: int) -> WaitingRequest | None:
        """Remove and return a request; None if it does not wait."""
        return self._waiting.pop(request_id, None)

    def clear(self) -> list[WaitingRequest]:
        """Remove and return all requests."""
        removed = list(self._waiting.values())
        self._waiting.clear()
        return removed

    def ahead_of(self, request_id: int) -> list[Holder]:
        """Return the holders of earlier requests that wait for the same devices or slots as the given one."""
        mine = self._waiting[request_id].request
        return [
            other.holder
            for number, other in self._waiting.items()
            if number < request_id
            if (mine.slots and other.request.slots) or not set(mine.candidates).isdisjoint(other.request.candidates)
        ]

    def awaited(self, lacking: Iterable[Shortage], unavailable: Collection[str]) -> dict[str, float]:
        """Return the devices to publish as awaited to other sessions, each with the arrival time of its request.

        These are all candidates of the requests in `lacking` that have an `unavailable` candidate.
        """
        since: dict[str, float] = {}
        for shortage in lacking:
            candidates = shortage.request.candidates
            if shortage.devices and any(device in unavailable for device in candidates):
                for device in candidates:
                    since.setdefault(device, self._waiting[shortage.request.id].since)
        return since

    def reserved(
        self, lacking: Iterable[Shortage], devices: Collection[str], others: Mapping[str, float]
    ) -> dict[str, Holder]:
        """Return those of the released `devices` that must stay locked for a request in `lacking`, with its holder.

        If they were unlocked, other sessions could take them one by one, and a request that needs several at once would
        starve. A device for which another session has waited longer is not reserved: otherwise two sessions that both
        need two devices and keep one each would deadlock.
        """
        reserved: dict[str, Holder] = {}
        for shortage in lacking:
            waiting = self._waiting[shortage.request.id]
            for device in waiting.request.candidates if shortage.devices else ():
                if device in devices and not waiting.is_behind(others, [device]):
                    reserved.setdefault(device, waiting.holder)
        return reserved
