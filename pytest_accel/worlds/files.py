"""What lies in a session's private folder: the sockets, logs, stacks and progress of its ranks."""

from __future__ import annotations

import os
import shutil
import tempfile

HEADING = "===== test: "
"""What the line begins with that stands before each test's output in a log that is kept."""


def kept_log_path(folder: str, world: int, rank: int) -> str:
    """The log of a rank in the folder of ``--accel-logs``."""
    return os.path.join(folder, f"world-{world}-rank-{rank}.log")


def server_log_path(directory: str, server: int) -> str:
    """What a fork server has written."""
    return os.path.join(directory, f"server-{server}.log" if server else "server.log")


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


RANK_FILES = (socket_path, log_path, stack_path, progress_path, flight_path)
"""Everything in the session's folder that belongs to one rank."""

_LONGEST_DIRECTORY = 80
"""Characters: a socket's path has at most 104 on macOS and 108 on Linux (unix(7))."""


def private_directory() -> str:
    """A new folder for a session, whose path is short enough for sockets."""
    directory = tempfile.mkdtemp(prefix="accel-")
    if len(directory) <= _LONGEST_DIRECTORY:
        return directory
    shutil.rmtree(directory)
    return tempfile.mkdtemp(prefix="accel-", dir="/tmp")
