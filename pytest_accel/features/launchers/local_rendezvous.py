"""The rendezvous of a launcher's processes on one machine: a Unix socket whose path follows from user and job."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Collection, Sequence

from pytest_accel.core.clock import monotonic
from pytest_accel.core.folder_trust import TEMPORARY, ensure_own_folder, ensure_safe
from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.core.log import step, step_once
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.features.launchers import greeting
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.handshakes import Handshake, Handshakes, Refused
from pytest_accel.leases.shared_folder import VARIABLE
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.struct_messages import LENGTH, encode, frame
from pytest_accel.messages.unix_sockets import Connection

TIMEOUT = 60.0
"""Seconds that a process waits for the others."""
_LONGEST_HELLO = 1 << 24
"""Maximum size of a greeting, in bytes; command lines may be long."""
_RETRY_INTERVAL = 0.02
"""Seconds between two attempts to connect to rank 0."""


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


def gather(
    process: LauncherEnv, timeout: float = TIMEOUT, expected: Collection[int] | None = None
) -> list[tuple[Hello, Connection]]:
    """Wait for the others, in rank 0; return their greetings and connections, in order of rank.

    `expected` are the ranks on this machine; None means all. Raise :class:`RendezvousError`, which names the missing
    ranks, after `timeout` seconds.
    """
    expected = range(1, process.size) if expected is None else expected
    if not expected:
        return []
    path = rendezvous_path(process)
    deadline = monotonic() + timeout
    step("listens at %s; waits for %s", path, ranks_text(list(expected)))
    found: dict[int, tuple[Hello, Connection]] = {}
    with _listen(path, process) as listener, Handshakes(listener, _receive_hello, process.size) as handshakes:
        try:
            while len(found) < len(expected):
                met = handshakes.wait(deadline)
                if met is None:
                    raise missing_ranks(process, [rank for rank in expected if rank not in found], timeout)
                call, hello = met
                if hello.rank in expected:
                    found[hello.rank] = hello, Connection(call.detach())
                absent = [rank for rank in expected if rank not in found]
                step("rank %d of this machine has connected%s", hello.rank, still_waits(absent))
                call.close()
        finally:
            os.unlink(path)
    return [found[rank] for rank in sorted(found)]


def _receive_hello(call: socket.socket) -> Handshake[Hello]:
    if not unix_sockets.is_own(call):
        raise Refused("is another user's")
    (length,) = LENGTH.unpack((yield LENGTH.size))
    if not 0 < length <= _LONGEST_HELLO:
        raise Refused("sent an invalid greeting")
    return greeting.read((yield length), Hello)


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
