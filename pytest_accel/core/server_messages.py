"""Messages between the pool and a fork server. All can be pickled."""

from __future__ import annotations

from msgspec import Struct

from pytest_accel.core.kill import Survivor
from pytest_accel.core.rank_exit import RankExit
from pytest_accel.core.shared_memory import SharedFile
from pytest_accel.core.world_spec import WorldSpec

# Controller to fork server


class StartWorld(Struct, frozen=True):
    """Start the ranks of `spec` that belong to this server."""

    spec: WorldSpec
    port: int | None = None
    """Port of the world's store, if another server has created it."""


class KillWorld(Struct, frozen=True):
    """Kill the ranks of `world`."""

    world: int
    after: float = 0.0
    """Seconds until the ranks are killed, in which they may exit by themselves."""


# Fork server to controller


class WorldStarted(Struct, frozen=True):
    """The ranks of `world` that belong to this server have been forked."""

    world: int
    pids: tuple[int, ...]
    """Pids of the ranks that this server has forked, in the order of the ranks."""
    port: int | None = None
    """Port of the world's store, or None if it has no store."""


class StartFailed(Struct, frozen=True):
    """The world could not be started; `text` is the reason."""

    world: int
    text: str


class RankExited(Struct, frozen=True):
    """The process of a rank has exited."""

    world: int
    rank: int
    exit: RankExit


class Survivors(Struct, frozen=True):
    """The processes of a world that live on although `server` has killed them.

    Each message replaces the one before. The world has ended once its ranks have exited and the list is empty.
    """

    world: int
    server: int
    processes: tuple[Survivor, ...]


class FilesOpened(Struct, frozen=True):
    """Ranks that were killed had these files in shared memory open."""

    files: tuple[SharedFile, ...]


class ServerNote(Struct, frozen=True):
    """A note that is shown with ``-v``."""

    text: str


class PreloadFailed(Struct, frozen=True):
    """The server cannot fork ranks because of a module that ``accel_preload`` names; `text` is the error."""

    text: str
