"""Where a launcher's processes find each other, on one machine: a socket whose path user and job give."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection

from pytest_accel.core import unix_sockets
from pytest_accel.core.clock import monotonic
from pytest_accel.core.handshakes import Handshake, Handshakes, Refused
from pytest_accel.core.launcher_env import Outer
from pytest_accel.core.paths import user_folder
from pytest_accel.leases.lock_dir import VARIABLE
from pytest_accel.nodes.agent_messages import Hello, receive_hello

PATIENCE = 60.0
"""Seconds that whoever comes first waits for the others."""
_LOOK = 0.02


class MeetingError(Exception):
    """The processes have not come together; the message says who did not come, or what they differ in."""


def meeting_path(outer: Outer) -> str:
    """Return the path of rank 0's socket. Sessions with different lock folders never meet.

    :class:`MeetingError` where another user could listen there.
    """
    try:
        folder = user_folder()
    except OSError as error:
        raise MeetingError(
            f"{error.filename}, where the processes that {outer.launcher} has started would meet, cannot be used: "
            f"{error.strerror}"
        ) from None
    locks = hashlib.sha256(os.fsencode(os.environ.get(VARIABLE, ""))).hexdigest()[:8]
    return os.path.join(folder, f"{locks}-{outer.key}.sock")


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
    deadline = monotonic() + patience
    found: dict[int, tuple[Hello, Connection]] = {}
    with _listen(path, outer) as listener, Handshakes(listener, _receive_hello, outer.size) as handshakes:
        try:
            while len(found) < len(expected):
                met = handshakes.wait(deadline)
                if met is None:
                    raise missing(outer, [rank for rank in expected if rank not in found], patience)
                call, hello = met
                if hello.rank in expected:
                    found[hello.rank] = hello, Connection(call.detach())
                call.close()
        finally:
            os.unlink(path)
    return [found[rank] for rank in sorted(found)]


def _receive_hello(call: socket.socket) -> Handshake[Hello]:
    if not unix_sockets.is_own(call):
        raise Refused("is another user's")
    return receive_hello()


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
        try:
            with unix_sockets.connect(path) as call:
                call.sendall(hello.pack())
                return Connection(call.detach())
        except PermissionError as error:
            raise MeetingError(f"rank {outer.rank} cannot meet rank 0 at {path}: {error.strerror}") from None
        except OSError:
            if monotonic() >= deadline:
                raise MeetingError(
                    f"{outer.launcher} has started {outer.size} processes, and rank 0 did not come to rank "
                    f"{outer.rank} within {patience:g} s"
                ) from None
        time.sleep(_LOOK)


def _listen(path: str, outer: Outer) -> socket.socket:
    try:
        unix_sockets.connect(path).close()
    except PermissionError as error:
        raise MeetingError(f"rank 0 cannot listen at {path}: {error.strerror}") from None
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # A process that was killed has left its socket.
    else:
        raise MeetingError(f"another session under {outer.launcher} with the job {'/'.join(outer.job)} is starting")
    return unix_sockets.listen(path, outer.size)
