"""The conversation between a driver and the pool: the messages, and the answers to a demand for a world.

A driver in the controller and one in an xdist worker send the same messages. All can be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from pytest_accel.leases.demand import WorldDemand
from pytest_accel.messages.rank_exit import RankExit
from pytest_accel.messages.world_spec import WorldSpec


class PoolError(Exception):
    """The pool cannot provide a world; the message says why."""


@dataclass(frozen=True, slots=True)
class WorldGrant:
    """The answer to a driver that gets a world, or a lease without one (`WorldKey.ranks`)."""

    spec: WorldSpec
    """The world; of a lease without one its number, its key and its devices."""
    pids: tuple[int, ...]
    directory: str
    warm: bool
    """True if a driver has had the world before."""
    waited: float
    """Seconds that the request waited for devices or CPU slots."""
    hosts: tuple[str, ...]
    """The names of the machines of the ranks, each once."""


# Driver to pool. Most of them call a method of `Pool`, whose docstring has the details.


class WarmServer(Struct, frozen=True):
    """Start the fork server."""


class SubmitDemand(Struct, frozen=True):
    """Request a world. An :class:`Answer` with `number` follows, unless the request is cancelled."""

    number: int
    demand: WorldDemand


class ShowWaiting(Struct, frozen=True):
    """Show what the request `number` waits for, since it has waited for `seconds`."""

    number: int
    seconds: float


class FailIfWaiting(Struct, frozen=True):
    """Cancel the request `number` if it waits for leases, and answer it with an error that says `why`."""

    number: int
    why: str


class CancelRequest(Struct, frozen=True):
    """Cancel the request `number`, without an answer."""

    number: int


class ReleaseWorld(Struct, frozen=True):
    """Return a world, or a lease without one."""

    world: int
    kill_reason: str | None
    noticed: frozenset[int]
    retire: bool


class WatchExit(Struct, frozen=True):
    """Ask for the exit status of a rank. An :class:`Answer` with `number` follows once the rank has ended."""

    number: int
    world: int
    rank: int


class InterruptedTest(Struct, frozen=True):
    """Record where the ranks of `world` are, since the session was interrupted while it ran `test`."""

    world: int
    test: str


class ShowLine(Struct, frozen=True):
    """Write a line to the terminal."""

    line: str


class EndWithUsageError(Struct, frozen=True):
    """End the session with `text`."""

    text: str


DriverMessage = (
    WarmServer
    | SubmitDemand
    | ShowWaiting
    | FailIfWaiting
    | CancelRequest
    | ReleaseWorld
    | WatchExit
    | InterruptedTest
    | ShowLine
    | EndWithUsageError
)

# Pool to driver


class Answer(Struct, frozen=True):
    """The answer to :class:`SubmitDemand` or :class:`WatchExit` with the same `number`."""

    number: int
    value: WorldGrant | PoolError | RankExit | None


class WorldWanted(Struct, frozen=True):
    """Another request waits for the devices or slots of `world`."""

    world: int


PoolMessage = Answer | WorldWanted
