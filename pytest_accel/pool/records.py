"""The records of the pool: one for each world and one for each driver that waits for a world."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from pytest_accel.core.rank_exit import RankExit
from pytest_accel.core.world_key import WorldKey
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.lease_table import Lease
from pytest_accel.nodes.remote_leases import RemoteLease
from pytest_accel.pool.multinode_lease import MultiNodeRequest


class PoolError(Exception):
    """The pool cannot provide a world; the message says why."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The pool's answer to a driver that gets a world."""

    spec: WorldSpec
    pids: tuple[int, ...]
    directory: str
    warm: bool
    """True if a driver has had the world before."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A driver's request for a world; it lives on as part of the world until the driver returns it."""

    id: int
    key: WorldKey
    holder: Holder
    answer: Callable[[Grant | PoolError], None]
    driver: object
    request: int | None = None
    """The request's number at the broker, while it waits there."""
    multinode: MultiNodeRequest | None = None
    """Replaces `request` while a world waits for devices of several nodes."""
    cancelled: bool = False
    retried: bool = False
    """True if the fork server has ended once while starting the world for this ticket."""

    @property
    def broker(self) -> str | None:
        """The device kind of the broker that gets the request; None for the broker of the CPU slots."""
        return None if self.key.need is None else self.key.kind


@dataclass(slots=True, eq=False)
class PooledWorld:
    """A world whose processes exist or are being started."""

    spec: WorldSpec
    state: Literal["starting", "leased", "idle", "retiring", "killed"]
    ticket: Ticket | None = None
    lease: Lease | None = None
    """The lease on devices of the controller's node; held as long as the world has processes."""
    remote_leases: dict[int, RemoteLease] = field(default_factory=dict)
    """The leases on devices of other nodes, by node number; held as long as `lease`."""
    slots: Lease | None = None
    """The lease on CPU slots; held as long as the world runs a test."""
    pids: tuple[int, ...] = ()
    exits: dict[int, RankExit] = field(default_factory=dict)
    """The exit status of each rank that has ended."""
    forced_exit: RankExit | None = None
    """If set, reported as the exit status of each rank instead of its own: the reason why the pool killed the world."""
    exit_callbacks: list[tuple[int, Callable[[RankExit | None], None]]] = field(default_factory=list)
    """Pairs of a rank and a callback that gets its exit status."""
    idle_since: float = 0.0
    """Time of creation, or of the last return by a driver (`clock.monotonic`)."""
    wanted: bool = False
    """True if another request waits for the world's devices or slots."""
    retired_at: float = 0.0
    """Time at which the ranks were told to end their sessions (`clock.monotonic`)."""
    stacks: dict[int, str] | None = None
    """Stacks of the ranks, taken shortly before a retiring world is killed; None if they were not taken."""

    @property
    def ended(self) -> bool:
        """True if every process of the world has ended."""
        return len(self.exits) == self.spec.ranks


def surplus(worlds: Iterable[PooledWorld], ranks: int) -> list[PooledWorld]:
    """Return the idle worlds to retire, longest idle first, so that at most `ranks` idle ranks stay.

    The world that became idle last stays, however many ranks it has.
    """
    idle = sorted((world for world in worlds if world.state == "idle"), key=lambda world: world.idle_since)
    excess = sum(world.spec.ranks for world in idle) - ranks
    to_retire = []
    for world in idle[:-1]:
        if excess <= 0:
            break
        excess -= world.spec.ranks
        to_retire.append(world)
    return to_retire
