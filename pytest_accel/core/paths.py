"""What lies in a session's private folder: the sockets, logs, stacks and progress of its ranks."""

from __future__ import annotations

import os
import shutil
import tempfile

from pytest_accel.core.folder_trust import ensure_own_folder, ensure_safe

HEADING = "===== test: "
"""What the line begins with that stands before each test's output in a log that is kept."""


def kept_log_path(folder: str, world: int, rank: int) -> str:
    """The log of a rank in the folder of ``--accel-logs``."""
    return os.path.join(folder, f"world-{world}-rank-{rank}.log")


def server_log_path(directory: str, server: int) -> str:
    """What a fork server has written."""
    return os.path.join(directory, f"server-{server}.log" if server else "server.log")


def shared_memory_path(directory: str, server: int | str) -> str:
    """Where a fork server notes what its ranks have made in shared memory; `server` may be a pattern."""
    return os.path.join(directory, f"shared-memory-{server}")


def bridge_path(directory: str, server: int) -> str:
    """Where the bridge to a fork server on another machine listens for calls."""
    return os.path.join(directory, f"far-{server}.sock")


def socket_path(directory: str, world: int, rank: int) -> str:
    """Where a rank listens for its driver."""
    return os.path.join(directory, f"w{world}r{rank}.sock")


def log_path(directory: str, world: int, rank: int) -> str:
    """What a rank wrote to file descriptors 1 and 2 outside of pytest's capture."""
    return os.path.join(directory, f"w{world}r{rank}.log")


def stack_path(directory: str, world: int, rank: int) -> str:
    """Where a rank's fault handler writes its stacks."""
    return os.path.join(directory, f"w{world}r{rank}.stack")


def progress_path(directory: str, world: int, rank: int) -> str:
    """Where a rank notes how far it has come in its test."""
    return os.path.join(directory, f"w{world}r{rank}.progress")


def flight_path(directory: str, world: int, rank: int) -> str:
    """Where a rank writes the record of its collectives."""
    return os.path.join(directory, f"w{world}r{rank}.flight")


def stdout_path(directory: str, world: int, rank: int) -> str:
    """Return the path of the standard output that pytest has captured in the running phase."""
    return os.path.join(directory, f"w{world}r{rank}.stdout")


def stderr_path(directory: str, world: int, rank: int) -> str:
    """Return the path of the standard error that pytest has captured in the running phase."""
    return os.path.join(directory, f"w{world}r{rank}.stderr")


def captured_log_path(directory: str, world: int, rank: int) -> str:
    """Return the path of the log records that pytest has captured in the running phase."""
    return os.path.join(directory, f"w{world}r{rank}.records")


def captured_path(directory: str, world: int, rank: int) -> str:
    """Return the path of the captured sections of those phases of the running test that have passed."""
    return os.path.join(directory, f"w{world}r{rank}.captured")


RANK_FILES = (
    socket_path,
    log_path,
    stack_path,
    progress_path,
    flight_path,
    stdout_path,
    stderr_path,
    captured_log_path,
    captured_path,
)
"""Everything in the session's folder that belongs to one rank."""

_LONGEST_DIRECTORY = 80
"""Characters: a socket's path has at most 104 on macOS and 108 on Linux (unix(7))."""


_TEMPORARY = "/tmp"


def private_directory() -> str:
    """Return a new folder for a session, whose path is short enough for sockets.

    Where every temporary folder is open to others, another user can replace it. The sockets are protected even then
    (`unix_sockets`).
    """
    try:
        ensure_safe(tempfile.gettempdir())
    except OSError:
        return tempfile.mkdtemp(prefix="accel-", dir=_TEMPORARY)
    directory = tempfile.mkdtemp(prefix="accel-")
    if len(directory) <= _LONGEST_DIRECTORY:
        return directory
    shutil.rmtree(directory)
    return tempfile.mkdtemp(prefix="accel-", dir=_TEMPORARY)


def user_folder() -> str:
    """Return the folder, made where it is missing, for sockets that processes of this user find by their names.

    It depends on the user alone, and not on TMPDIR or XDG_RUNTIME_DIR, which a launcher may set in one process of a job
    and not in another. OSError names the path and what to do, where another user could put something in its place.
    """
    ensure_safe(_TEMPORARY)
    path = os.path.join(_TEMPORARY, f"pytest-accel-{os.geteuid()}")
    ensure_own_folder(path)
    return path
