"""A driver's request for a world, and the pool's answers to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pytest_accel.core.clock import monotonic
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.pool.lease_request import LeaseRequest
from pytest_accel.pool.place_request import PlaceRequest


class PoolError(Exception):
    """The pool cannot provide a world; the message says why."""


@dataclass(frozen=True, slots=True)
class WorldGrant:
    """The answer to a driver that gets a world."""

    spec: WorldSpec
    pids: tuple[int, ...]
    directory: str
    warm: bool
    """True if a driver has had the world before."""
    waited: float
    """Seconds that the request waited for devices or CPU slots."""
    hosts: tuple[str, ...]
    """The names of the machines of the ranks, each once."""


class WantedObserver(Protocol):
    """The pool's view of a driver."""

    def on_wanted(self, world: int) -> None:
        """Note that another request waits for the devices or slots of `world`, which this driver has."""


@dataclass(slots=True, eq=False)
class WorldRequest:
    """A driver's request for a world; it lives on as part of the world until the driver returns it."""

    id: int
    demand: WorldDemand
    driver: WantedObserver
    answer: Callable[[WorldGrant | PoolError], None]
    lease_request: LeaseRequest | PlaceRequest | None = None
    """The request for the place and the leases that the world needs, while it waits for them."""
    cancelled: bool = False
    retried: bool = False
    """True if a fork server has ended, or a machine was lost, once while providing the world for this request."""
    since: float = field(default_factory=monotonic)
    waited: float | None = None
    """Seconds until the request had its devices or CPU slots; None while it has none."""

    def cancel(self) -> None:
        """Cancel the request and what it waits for."""
        self.cancelled = True
        if self.lease_request is not None:
            self.lease_request.cancel()

    def end_wait(self) -> float:
        """Note that the request has its devices or CPU slots, unless that is known; return :attr:`waited`."""
        if self.waited is None:
            self.waited = monotonic() - self.since
        return self.waited
