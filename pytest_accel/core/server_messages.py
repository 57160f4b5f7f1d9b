"""Messages between the pool and a fork server. All can be pickled."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_accel.core.rank_exit import RankExit
from pytest_accel.core.world_spec import WorldSpec

# Controller to fork server


@dataclass(frozen=True, slots=True)
class StartWorld:
    """Start the ranks of `spec` that belong to this server.

    If `spec` is `parted`, the descriptors of `run_ahead.connect` follow the message.
    """

    spec: WorldSpec
    port: int | None = None
    """Port of the world's store, if another server has created it."""


@dataclass(frozen=True, slots=True)
class KillWorld:
    """Kill the ranks of `world`."""

    world: int
    after: float = 0.0
    """Seconds until the ranks are killed, in which they may exit by themselves."""


@dataclass(frozen=True, slots=True)
class Preload:
    """Import `modules`, so that ranks need not."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeepOut:
    """Exit, after an :class:`ImportedAhead`, if one of `modules` has been preloaded.

    Ranks must import these modules themselves. A server with running worlds ignores the message.
    """

    modules: tuple[str, ...]


# Fork server to controller


@dataclass(frozen=True, slots=True)
class WorldStarted:
    """The ranks of `world` that belong to this server have been forked."""

    world: int
    pids: tuple[int, ...]
    """Pids of the ranks that this server has forked, in the order of the ranks."""
    port: int | None = None
    """Port of the world's store, or None if it has no store."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The world could not be started; `text` is the reason."""

    world: int
    text: str


@dataclass(frozen=True, slots=True)
class RankExited:
    """The process of a rank has exited."""

    world: int
    rank: int
    exit: RankExit


@dataclass(frozen=True, slots=True)
class ServerNote:
    """A note that is shown with ``-v``."""

    text: str


@dataclass(frozen=True, slots=True)
class ImportedAhead:
    """The answer to :class:`KeepOut` of a server that has imported `module`."""

    module: str
