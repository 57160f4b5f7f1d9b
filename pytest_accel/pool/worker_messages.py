"""Messages between an xdist worker and the pool in the controller. All can be pickled."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_accel.core.rank_exit import RankExit
from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.holder import Holder
from pytest_accel.pool.world_request import AcquiredWorld, PoolError

# Worker to controller. Most of them call a method of `Pool`, whose docstring has the details.


@dataclass(frozen=True, slots=True)
class WarmServer:
    """Start the fork server."""


@dataclass(frozen=True, slots=True)
class PreloadModules:
    """Have the fork server import `modules`."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImportNothingAhead:
    """Have ranks forked from a server that has imported only torch and pytest."""

    why: str


@dataclass(frozen=True, slots=True)
class KeepModulesOut:
    """Have ranks forked from a server that has not preloaded any of `modules`."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AcquireWorld:
    """Request a world. An :class:`Answer` with `number` follows, unless the request is cancelled."""

    number: int
    key: WorldKey
    holder: Holder


@dataclass(frozen=True, slots=True)
class ShowWaiting:
    """Show what the request `number` waits for, since it has waited for `seconds`."""

    number: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FailIfWaiting:
    """Cancel the request `number` if it waits for leases, and answer it with an error that says `why`."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancel the request `number`, without an answer."""

    number: int


@dataclass(frozen=True, slots=True)
class ReleaseWorld:
    """Return a world."""

    world: int
    kill_reason: str | None
    noticed: frozenset[int]
    retire: bool


@dataclass(frozen=True, slots=True)
class WatchExit:
    """Ask for the exit status of a rank. An :class:`Answer` with `number` follows once the rank has ended."""

    number: int
    world: int
    rank: int


@dataclass(frozen=True, slots=True)
class InterruptedTest:
    """Record where the ranks of `world` are, since the session was interrupted while it ran `test`."""

    world: int
    test: str


@dataclass(frozen=True, slots=True)
class ShowLine:
    """Write a line to the terminal."""

    line: str


@dataclass(frozen=True, slots=True)
class EndWithUsageError:
    """End the session with `text`."""

    text: str


@dataclass(frozen=True, slots=True)
class EndAfterTest:
    """The worker ends now, because the test `index` of its collection has left a device unusable."""

    index: int


WorkerMessage = (
    WarmServer
    | PreloadModules
    | ImportNothingAhead
    | KeepModulesOut
    | AcquireWorld
    | ShowWaiting
    | FailIfWaiting
    | CancelRequest
    | ReleaseWorld
    | WatchExit
    | InterruptedTest
    | ShowLine
    | EndWithUsageError
    | EndAfterTest
)

# Controller to worker


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to :class:`AcquireWorld` or :class:`WatchExit` with the same `number`."""

    number: int
    value: AcquiredWorld | PoolError | RankExit | None


@dataclass(frozen=True, slots=True)
class WorldWanted:
    """Another request waits for the devices or slots of `world`."""

    world: int


ControllerMessage = Answer | WorldWanted
