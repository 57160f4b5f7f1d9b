"""Paths of the files in a session's private folder, such as sockets, logs and stacks of ranks; the current folder."""

from __future__ import annotations

import os
from contextlib import suppress

HEADING = "===== test: "
"""Prefix of the line that precedes each test's output in a log of ``--accel-output``."""

END_OF_CALL = "\0"
"""Text in a file of `terminal_path` after what a rank has written in the setup and the call of a test."""
UNFINISHED = "\x1e"
"""Text in such a file after a line without a line end, as pytest shows fixtures. Other text begins on a new line."""


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


def log_path(directory: str, world: int, rank: int) -> str:
    """Return the path of a rank's output to file descriptors 1 and 2 outside pytest's capture."""
    return os.path.join(directory, f"w{world}r{rank}.log")


def stack_path(directory: str, world: int, rank: int) -> str:
    """Return the path of the stacks that a rank's fault handler writes."""
    return os.path.join(directory, f"w{world}r{rank}.stack")


def flight_path(directory: str, world: int, rank: int) -> str:
    """Return the path of a rank's record of its collectives (flight recorder)."""
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


def log_file_path(directory: str, world: int, rank: int) -> str:
    """Return the path of what the ranks of a world on one machine write to the session's log file, in order of time.

    They share the file, so it is the same for each `rank`.
    """
    return os.path.join(directory, f"w{world}.logfile")


def terminal_path(directory: str, world: int, rank: int) -> str:
    """Return the path of what the ranks of a world on one machine show at the terminal; the same for each `rank`."""
    return os.path.join(directory, f"w{world}.terminal")


def store_folder(directory: str, world: int) -> str:
    """Return the path of the folder with the values that the ranks of a world share if torch is not installed."""
    return os.path.join(directory, f"w{world}.store")


def inner_lock_folder(directory: str, world: int, rank: int | None) -> str:
    """Return the path of the lock folder of the sessions inside a world's ranks, or inside one `rank` of it."""
    return os.path.join(directory, f"w{world}.locks" if rank is None else f"w{world}r{rank}.locks")


CAPTURED_FILES = {"stdout": stdout_path, "stderr": stderr_path, "log": captured_log_path}
"""The functions for what pytest captures, by pytest's name of it, in the order in which pytest shows them."""
RANK_FILES = (
    socket_path,
    log_path,
    stack_path,
    flight_path,
    *CAPTURED_FILES.values(),
    log_file_path,
    terminal_path,
)
"""Functions that return the paths of all files of one rank in the session's folder."""


def current_folder() -> str | None:
    """Return the working directory of this process; None if it has been removed."""
    with suppress(OSError):
        return os.getcwd()
    return None
