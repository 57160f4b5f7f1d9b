"""Paths of the files in a session's private folder, such as sockets, logs and stacks of ranks; the current folder."""

from __future__ import annotations

import os
from contextlib import suppress

HEADING = "\n===== test: "
"""Text before the name of each test, whose output follows, in a file of ``--accel-output``."""


LAST_PLACE_SIZE = 1024
"""Bytes at the beginning of a file of stacks for the place of the rank's last collective."""


def kept_log_path(folder: str, world: int, rank: int) -> str:
    """Return the path of a rank's log in the folder of ``--accel-output``."""
    return os.path.join(folder, f"world-{world}-rank-{rank}.log")


def server_log_path(directory: str, server: int) -> str:
    """Return the path of a fork server's output."""
    return os.path.join(directory, f"server-{server}.log" if server else "server.log")


def agent_path(directory: str, server: int) -> str:
    """Return the path of the socket through which drivers reach the agent of a fork server on another machine."""
    return os.path.join(directory, f"agent-{server}.sock")


def socket_path(directory: str, world: int, rank: int) -> str:
    """Return the path of the socket on which a rank waits for its driver."""
    return os.path.join(directory, f"w{world}r{rank}.sock")


def stack_path(directory: str, world: int, rank: int) -> str:
    """Return the path of the stacks that a rank's fault handler writes, after the place of its last collective."""
    return os.path.join(directory, f"w{world}r{rank}.stack")


def flight_path(directory: str, world: int, rank: int) -> str:
    """Return the path of a rank's record of its collectives (flight recorder)."""
    return os.path.join(directory, f"w{world}r{rank}.flight")


def stdout_path(directory: str, world: int, rank: int) -> str:
    """Return the path of the file that descriptor 1 of a rank refers to, and in some sessions descriptor 2, too."""
    return os.path.join(directory, f"w{world}r{rank}.stdout")


def stderr_path(directory: str, world: int, rank: int) -> str:
    """Return the path of the file that descriptor 2 of a rank refers to, if it has one of its own."""
    return os.path.join(directory, f"w{world}r{rank}.stderr")


def records_path(directory: str, world: int, rank: int) -> str:
    """Return the path of the log records that pytest has captured in the running phase."""
    return os.path.join(directory, f"w{world}r{rank}.records")


def terminal_path(directory: str, world: int, rank: int) -> str:
    """Return the path of the live logs and the fixtures that pytest shows in a rank."""
    return os.path.join(directory, f"w{world}r{rank}.terminal")


def store_folder(directory: str, world: int) -> str:
    """Return the path of the folder with the values that the ranks of a world share if torch is not installed."""
    return os.path.join(directory, f"w{world}.store")


def inner_lock_folder(directory: str, world: int, rank: int | None) -> str:
    """Return the path of the lock folder of the sessions inside a world's ranks, or inside one `rank` of it."""
    return os.path.join(directory, f"w{world}.locks" if rank is None else f"w{world}r{rank}.locks")


CAPTURED_FILES = {"stdout": stdout_path, "stderr": stderr_path, "log": records_path}
"""The functions for what pytest captures, by pytest's name of it, in the order in which pytest shows them."""
RANK_FILES = (socket_path, stack_path, flight_path, *CAPTURED_FILES.values(), terminal_path)
"""Functions that return the paths of all files of one rank in the session's folder."""


def current_folder() -> str | None:
    """Return the working directory of this process; None if it has been removed."""
    with suppress(OSError):
        return os.getcwd()
    return None
