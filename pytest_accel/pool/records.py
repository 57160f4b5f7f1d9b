"""What the pool knows of the worlds that it has, and of the drivers that wait for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from pytest_accel.core.messages import WorldSpec
from pytest_accel.core.world_key import WorldShape
from pytest_accel.leases.lease_table import Lease
from pytest_accel.leases.locks import Holder
from pytest_accel.nodes.remote_leases import FarLease
from pytest_accel.pool.multinode_lease import Gang


class PoolError(Exception):
    """A world could not be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A world, as its driver gets it."""

    spec: WorldSpec
    pids: tuple[int, ...]
    directory: str
    warm: bool
    """Whether somebody has had it before."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A driver that waits for a world, or has it."""

    id: int
    shape: WorldShape
    holder: Holder
    answer: Callable[[Grant | PoolError], None]
    driver: object
    request: int | None = None
    """Its number at the broker, while it waits there."""
    gang: Gang | None = None
    """What it waits for in place of a `request`, where its world needs devices of several machines."""
    cancelled: bool = False
    retried: bool = False
    """Whether the fork server has already ended once while starting its world."""

    @property
    def broker(self) -> str | None:
        """The kind whose broker it waits at; None: that of the CPU slots."""
        return None if self.shape.need is None else self.shape.kind


@dataclass(slots=True, eq=False)
class PooledWorld:
    """A world that has processes, or is about to."""

    spec: WorldSpec
    shape: WorldShape
    state: Literal["starting", "leased", "idle", "retiring", "killed"]
    ticket: Ticket | None = None
    lease: Lease | None = None
    """The lease on its devices, which lasts as long as its processes do."""
    far: dict[int, FarLease] = field(default_factory=dict)
    """As `lease`, of other machines."""
    slots: Lease | None = None
    """The lease on CPU slots, which lasts as long as a test runs in it."""
    pids: tuple[int, ...] = ()
    exits: dict[int, int] = field(default_factory=dict)
    """Exit status by rank, of those that have ended."""
    killed_as: int | None = None
    """What to give as the exit status of each rank in place of its own, since this session killed the world for it."""
    watchers: list[tuple[int, Callable[[int | None], None]]] = field(default_factory=list)
    """Who wants to know how a rank ends."""
    idle_since: float = 0.0
    """When it was last left without a test: at its start, or when a driver gave it back."""
    wanted: bool = False
    """Whether somebody waits for what it holds."""
    retired: float = 0.0
    """When its sessions were told to end."""
    stacks: dict[int, str] | None = None
    """Of the ranks whose sessions were about to be killed; None: it has not come to that."""

    @property
    def ended(self) -> bool:
        """Whether every process is gone."""
        return len(self.exits) == self.spec.ranks


def surplus(worlds: Iterable[PooledWorld], ranks: int) -> list[PooledWorld]:
    """The worlds without a test, longest idle first, that must go for at most `ranks` warm ranks to stay.

    The last one to become idle stays, however large it is.
    """
    idle = sorted((world for world in worlds if world.state == "idle"), key=lambda world: world.idle_since)
    excess = sum(world.spec.ranks for world in idle) - ranks
    going = []
    for world in idle[:-1]:
        if excess <= 0:
            break
        excess -= world.spec.ranks
        going.append(world)
    return going
