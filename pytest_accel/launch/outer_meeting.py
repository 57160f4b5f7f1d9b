"""Where a launcher's processes find each other, on one machine: a socket whose path the job's identity gives."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from pytest_accel.clock import monotonic
from pytest_accel.launch.outer import Outer
from pytest_accel.launch.outer_messages import Hello
from pytest_accel.leases.folder import LockFolderError, default_folder, prepare_folder

PATIENCE = 60.0
"""Seconds that whoever comes first waits for the others."""
_LOOK = 0.02
_LONGEST = 100
"""Characters: a socket's path has at most 104 on macOS and 108 on Linux (unix(7))."""


class MeetingError(Exception):
    """The processes have not come together; the message says who did not come, or what they differ in."""


def meeting_path(outer: Outer) -> str:
    """The socket of rank 0: below the folder of the locks, or in ``/tmp`` where its path would be too long."""
    name = f"outer-{os.getuid()}"
    path = os.path.join(default_folder(), name, f"{outer.key}.sock")
    return path if len(path) <= _LONGEST else f"/tmp/accel-{name}/{outer.key}.sock"


def gather(
    outer: Outer, patience: float = PATIENCE, expected: Collection[int] | None = None
) -> list[tuple[Hello, Connection]]:
    """As rank 0: the others, by rank. :class:`MeetingError` names those who did not come in time.

    `expected` are those of this machine; None: all.
    """
    expected = range(1, outer.size) if expected is None else expected
    if not expected:
        return []
    path = meeting_path(outer)
    _prepare(os.path.dirname(path))
    deadline = monotonic() + patience
    found: dict[int, tuple[Hello, Connection]] = {}
    with _listen(path, outer) as listener:
        try:
            while len(found) < len(expected):
                listener.settimeout(max(0.001, deadline - monotonic()))
                connection = Connection(listener.accept()[0].detach())
                if not connection.poll(max(0.0, deadline - monotonic())):
                    raise TimeoutError
                with contextlib.suppress(EOFError, OSError):  # It has gone again.
                    hello: Hello = connection.recv()
                    found[hello.rank] = (hello, connection)
        except TimeoutError:
            raise missing(outer, [rank for rank in expected if rank not in found], patience) from None
        finally:
            os.unlink(path)
    return [found[rank] for rank in sorted(found)]


def missing(outer: Outer, ranks: Sequence[int], patience: float) -> MeetingError:
    """What is to be said when `ranks` did not come."""
    return MeetingError(
        f"{outer.launcher} has started {outer.size} processes, and rank {', '.join(map(str, ranks))} did not come "
        f"within {patience:g} s: each has to run pytest with this plugin (--accel-launcher none: each runs all tests "
        "by itself)"
    )


def join(outer: Outer, hello: Hello, patience: float = PATIENCE) -> Connection:
    """As any other rank: the connection to rank 0. :class:`MeetingError` if it does not come in time."""
    path = meeting_path(outer)
    deadline = monotonic() + patience
    while True:
        call = socket.socket(socket.AF_UNIX)
        try:
            _check(os.path.dirname(path))
            call.connect(path)
        except OSError:
            call.close()
            if monotonic() >= deadline:
                raise MeetingError(
                    f"{outer.launcher} has started {outer.size} processes, and rank 0 did not come to rank "
                    f"{outer.rank} within {patience:g} s"
                ) from None
            time.sleep(_LOOK)
            continue
        connection = Connection(call.detach())
        connection.send(hello)
        return connection


def _prepare(folder: str) -> None:
    try:
        prepare_folder(Path(folder).parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        _check(folder)
    except (OSError, LockFolderError) as error:
        raise MeetingError(f"the folder {folder}, where the processes would meet, cannot be used: {error}") from None


def _check(folder: str) -> None:
    """OSError where somebody else could listen there in our name."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user's alone (mode 0700)")


def _listen(path: str, outer: Outer) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    with socket.socket(socket.AF_UNIX) as call:
        try:
            call.connect(path)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # Of a process that was killed.
        else:
            raise MeetingError(f"another session under {outer.launcher} with the job {'/'.join(outer.job)} is starting")
    listener.bind(path)
    listener.listen(outer.size)
    return listener
