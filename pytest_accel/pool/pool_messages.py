"""The conversation between a driver and the pool: the messages, and the answers to a demand for a world.

Drivers in the controller and in xdist workers send the same messages. In the controller, the objects are passed on;
between processes, `messages/struct_messages.py` serializes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from pytest_accel.leases.demand import WorldDemand
from pytest_accel.messages.rank_exit import RankExit
from pytest_accel.messages.world_spec import WorldSpec


@dataclass(frozen=True, slots=True)
class WorldGrant:
    """The answer to a driver that gets a world, or a lease without ranks (`WorldKey.ranks`)."""

    spec: WorldSpec
    """The world; for a lease without ranks, the number, key and devices of the lease."""
    pids: tuple[int, ...]
    directory: str
    warm: bool
    """True if a driver has had the world before."""
    waited: float
    """Seconds that the request waited for devices or CPU slots."""
    hosts: tuple[str, ...]
    """The names of the machines of the ranks, each once."""


# Driver to pool


class WarmServer(Struct, frozen=True, tag=True):
    """Start the fork server."""


class CancelDemand(Struct, frozen=True, tag=True):
    """Cancel a demand, without an answer."""

    number: int


class GiveBackWorld(Struct, frozen=True, tag=True):
    """Give back a world, or a lease without ranks; see `Pool.give_back`."""

    world: int
    kill_reason: str | None = None
    noticed: frozenset[int] = frozenset()
    retire: bool = False
    interrupted: str | None = None
    """The test during which the session was interrupted, empty if it is unknown; None without an interrupt."""


class ShowLine(Struct, frozen=True, tag=True):
    """Write a line to the terminal."""

    line: str
    is_usage_error: bool = False
    """True if the session ends with this line."""


PoolRequest = WarmServer | WorldDemand | CancelDemand | GiveBackWorld
DriverMessage = PoolRequest | ShowLine

# Pool to driver


class Answer(Struct, frozen=True, tag=True):
    """The answer to the :class:`WorldDemand` with the same `number`."""

    number: int
    value: WorldGrant | str
    """The text says why the pool cannot provide a world."""


class WorldWanted(Struct, frozen=True, tag=True):
    """Another request waits for the devices or slots of `world`."""

    world: int


class RankEnded(Struct, frozen=True, tag=True):
    """A rank of a world that the driver has, or will get, has ended."""

    world: int
    rank: int
    end: RankExit


PoolMessage = Answer | WorldWanted | RankEnded
