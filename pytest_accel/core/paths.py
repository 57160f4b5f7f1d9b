"""Paths of the files in a session's private folder, such as sockets, logs and stacks of ranks; the current folder."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Literal

HEADING = "\n===== test: "
"""Text before the name of each test, whose output follows, in a file of ``--accel-output``."""
ShownFile = Literal["output", "terminal"]
"""The files that a driver may show while they grow (`driver.output_tail`)."""
RankFile = Literal["sock", "stack", "flight", "output", "records", "terminal"]
"""The files of a rank in the session's folder.

- ``sock``: the socket on which the rank waits for its driver
- ``stack``: the place of its last collective, then the stacks that its fault handler writes
- ``flight``: the record of its collectives (flight recorder)
- ``output``: what its standard streams write
- ``records``: the log records that pytest has captured in the running phase
- ``terminal``: the live logs and the fixtures that pytest shows in it
"""
LAST_PLACE_SIZE = 1024
"""Bytes at the beginning of a file of stacks for the place of the rank's last collective."""


def server_log_path(directory: str, server: int) -> str:
    """Return the path of a fork server's output."""
    return os.path.join(directory, f"server-{server}.log" if server else "server.log")


def agent_path(directory: str, server: int) -> str:
    """Return the path of the socket through which drivers reach the agent of a fork server on another machine."""
    return os.path.join(directory, f"agent-{server}.sock")


def rank_path(directory: str, world: int, rank: int, file: RankFile) -> str:
    """Return the path of the `file` of a rank."""
    return os.path.join(directory, f"w{world}r{rank}.{file}")


def store_folder(directory: str, world: int) -> str:
    """Return the path of the folder with the values that the ranks of a world share if torch is not installed."""
    return os.path.join(directory, f"w{world}.store")


def inner_lock_folder(directory: str, world: int, rank: int | None) -> str:
    """Return the path of the lock folder of the sessions inside a world's ranks, or inside one `rank` of it."""
    return os.path.join(directory, f"w{world}.locks" if rank is None else f"w{world}r{rank}.locks")


def current_folder() -> str | None:
    """Return the working directory of this process; None if it has been removed."""
    with suppress(OSError):
        return os.getcwd()
    return None
