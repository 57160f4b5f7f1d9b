"""The conversation of a fork server: with the process that starts it, with the pool, and with a new interpreter.

Each message is a frozen struct in JSON (`messages/struct_messages.py`). A new process finds its first message in an
unnamed file: a file takes a message of any size at once, while a write to a socket blocks until the process reads,
which a fork server does only when it has imported torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, TypeVar

from msgspec import Struct

from pytest_accel.messages.rank_messages import RankExit
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.world_spec import WorldSpec

_Message = TypeVar("_Message")

# To a new process


class Serve(Struct, frozen=True):
    """Serve `controller` as a fork server of its session, the second step of a fork server."""

    spec: SessionSpec
    controller: int
    environment: Mapping[str, str] | None = None
    """The environment to take on; None if the process has been started with it."""


# Pool to fork server


class StartWorld(Struct, frozen=True, tag=True):
    """Start the ranks of a world that belong to this server."""

    spec: WorldSpec | None
    """None if it is in an unnamed file, so that a world of any size never blocks the pool while the server imports."""
    port: int | None = None
    """Port of the world's store, if another server has created it."""
    descriptors: int = 0
    """Number of the descriptors that follow: the file's, and the descriptors that all ranks of the world inherit."""


class KillWorld(Struct, frozen=True, tag=True):
    """Kill the ranks of `world`."""

    world: int


ServerRequest = StartWorld | KillWorld

# Fork server to pool


class WorldStarted(Struct, frozen=True, tag=True):
    """The ranks of `world` that belong to this server have been forked, unless there is a `problem`."""

    world: int
    pids: tuple[int, ...] = ()
    """Pids of the ranks that this server has forked, in the order of the ranks."""
    port: int | None = None
    """Port of the world's store, or None if it has no store."""
    problem: str = ""
    """Why the world could not be started; no process of it is left then."""


class RankExited(Struct, frozen=True, tag=True):
    """The process of a rank has exited."""

    world: int
    rank: int
    exit: RankExit


class ServerNotice(Struct, frozen=True, tag=True):
    """Something for the session's summary."""

    error: str = ""
    """Why the server can never fork ranks: an error of a module that ``accel_preload`` names."""
    survivors: tuple[str, ...] = ()
    """Processes that the server could not kill at its end."""


ServerReport = WorldStarted | RankExited | ServerNotice

# Messages in files


@contextmanager
def file_with(message: object, directory: str) -> Iterator[IO[bytes]]:
    """Provide an unnamed file in `directory` that contains `message`, for :func:`read_file` in another process."""
    with TemporaryFile(dir=directory) as file:
        file.write(encode(message))
        file.seek(0)
        yield file


def read_file(descriptor: int, form: type[_Message]) -> _Message:
    """Return the message of the type `form` in the unnamed file `descriptor`, and close the file."""
    with open(descriptor, "rb") as file:
        message: _Message = decode(file.read(), form)
    return message
