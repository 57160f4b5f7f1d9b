"""The rendezvous of a launcher's processes on one machine: a Unix socket whose path follows from user and job."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import time
from collections.abc import Collection, Sequence
from typing import TypeVar

from pytest_accel.core.clock import monotonic
from pytest_accel.core.folder_trust import TEMPORARY, ensure_own_folder, ensure_safe
from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.core.log import step, step_once
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.leases.shared_folder import VARIABLE
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.struct_messages import LENGTH, decode, encode, frame
from pytest_accel.messages.unix_sockets import Connection

TIMEOUT = 60.0
"""Seconds that a process waits for the others."""
_LONGEST = 1 << 24
"""Maximum size of a greeting, in bytes; command lines may be long."""
_GREETING_TIMEOUT = 5
"""Seconds that a process of this user may take to send its greeting, while the others wait."""
_RETRY_INTERVAL = 0.02
"""Seconds between two attempts to connect to rank 0."""
Greeting = TypeVar("Greeting")


class RendezvousError(Exception):
    """The processes did not find each other; the message says why, and names missing ranks."""


def rendezvous_path(process: LauncherEnv) -> str:
    """Return the path of rank 0's socket; it differs for sessions with different lock folders.

    Raise :class:`RendezvousError` if the folder cannot be used, for example because another user could listen there.
    """
    try:
        folder = _user_folder()
    except OSError as error:
        raise RendezvousError(
            f"{error.filename}, where the processes that {process.launcher} has started would meet, cannot be used: "
            f"{error.strerror}"
        ) from None
    locks = hashlib.sha256(os.fsencode(os.environ.get(VARIABLE, ""))).hexdigest()[:8]
    return os.path.join(folder, f"{locks}-{process.key}.sock")


def _user_folder() -> str:
    """Return the folder for sockets that processes of this user find by name; create it if it is missing.

    The path depends only on the user. Raise OSError, with the path and the remedy, if another user could replace the
    folder.
    """
    ensure_safe(TEMPORARY)
    path = os.path.join(TEMPORARY, f"pytest-accel-{os.geteuid()}")
    ensure_own_folder(path)
    return path


def gather(process: LauncherEnv, expected: Collection[int], timeout: float = TIMEOUT) -> list[tuple[Hello, Connection]]:
    """Wait for the ranks `expected` on this machine, in rank 0; return their greetings and connections, by rank.

    Raise :class:`RendezvousError`, which names the missing ranks, after `timeout` seconds.
    """
    if not expected:
        return []
    path = rendezvous_path(process)
    deadline = monotonic() + timeout
    step("listens at %s; waits for %s", path, ranks_text(list(expected)))
    found: dict[int, tuple[Hello, Connection]] = {}
    with _listen(path, process) as listener:
        try:
            while len(found) < len(expected):
                met = accept(listener, Hello, deadline - monotonic())
                if met is None:
                    if monotonic() >= deadline:
                        raise missing_ranks(process, [rank for rank in expected if rank not in found], timeout)
                    continue
                call, hello = met
                if hello.rank in expected:
                    found[hello.rank] = hello, Connection(call.detach())
                absent = [rank for rank in expected if rank not in found]
                step("rank %d of this machine has connected%s", hello.rank, still_waits(absent))
                call.close()
        finally:
            os.unlink(path)
    return [found[rank] for rank in sorted(found)]


def accept(listener: socket.socket, form: type[Greeting], timeout: float) -> tuple[socket.socket, Greeting] | None:
    """Wait for a process of this user, and return its connection and its greeting, which has the type `form`.

    Return None if none has connected within `timeout` seconds, or if the process has sent something else.
    """
    if not unix_sockets.is_readable(listener.fileno(), max(0.0, timeout)):
        return None
    listener.setblocking(False)  # The process may be another user's.
    try:
        call = unix_sockets.accept(listener)
    except OSError:
        return None
    try:
        unix_sockets.limit_reads(call, _GREETING_TIMEOUT)
        (length,) = LENGTH.unpack(call.recv(LENGTH.size, socket.MSG_WAITALL))
        if not 0 < length <= _LONGEST:
            raise ValueError(length)
        greeting: Greeting = decode(call.recv(length, socket.MSG_WAITALL), form)
        unix_sockets.limit_reads(call, 0)
    except (OSError, ValueError, struct.error):
        call.close()
        return None
    return call, greeting


def still_waits(absent: Sequence[int]) -> str:
    """Return the end of a step in the log of rank 0: for which ranks it still waits."""
    return f"; still waits for {ranks_text(absent)}" if absent else ""


def missing_ranks(process: LauncherEnv, ranks: Sequence[int], timeout: float) -> RendezvousError:
    """Return the error for `ranks` that did not connect within `timeout` seconds."""
    return RendezvousError(
        f"{process.launcher} has started {process.size} processes, and {ranks_text(ranks)} did not "
        f"connect within {timeout:g} s: each process must run pytest with this plugin (with --accel-launcher off, "
        "each runs all tests by itself)"
    )


def join(process: LauncherEnv, hello: Hello, timeout: float = TIMEOUT) -> Connection:
    """Connect this rank to rank 0; return the connection. Raise :class:`RendezvousError` after `timeout` seconds."""
    path = rendezvous_path(process)
    deadline = monotonic() + timeout
    seen: set[str] = set()
    step("looks for rank 0 at %s", path)
    while True:
        try:
            with unix_sockets.connect(path) as call:
                call.sendall(frame(encode(hello)))
                step("is connected to rank 0")
                return Connection(call.detach())
        except PermissionError as error:
            raise RendezvousError(f"rank {process.rank} cannot connect to rank 0 at {path}: {error.strerror}") from None
        except OSError as error:
            step_once(seen, "cannot connect to rank 0 at %s: %s", path, error.strerror)
            if monotonic() >= deadline:
                raise RendezvousError(
                    f"{process.launcher} has started {process.size} processes, and rank {process.rank} did not reach "
                    f"rank 0 within {timeout:g} s"
                ) from None
        time.sleep(_RETRY_INTERVAL)


def _listen(path: str, process: LauncherEnv) -> socket.socket:
    try:
        unix_sockets.connect(path).close()
    except PermissionError as error:
        raise RendezvousError(f"rank 0 cannot listen at {path}: {error.strerror}") from None
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # The socket of a process that was killed.
    else:
        raise RendezvousError(
            f"another session under {process.launcher} with the job {'/'.join(process.job)} is starting"
        )
    return unix_sockets.listen(path, process.size)
