"""Functions that tell whether a process or a thread is computing."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import psutil

_AT_WORK = ("R", "D")
"""States of a thread that runs or waits for a processor, and of one that waits for a disk."""


def is_at_work(pid: int) -> bool:
    """Return True if a thread of the process runs, or waits only for a processor or a disk."""
    if sys.platform == "linux":
        return any(_state(stat) in _AT_WORK for stat in Path(f"/proc/{pid}/task").glob("*/stat"))
    else:  # noqa: RET505 - without `else`, mypy calls these lines unreachable on Linux.
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(pid).status() == psutil.STATUS_RUNNING)
        return False


def is_thread_at_work(number: int) -> bool:
    """Return True if the thread `number` (`threading.Thread.native_id`) of this process is at work; Linux only."""
    return _state(Path(f"/proc/self/task/{number}/stat")) in _AT_WORK


def _state(stat: Path) -> str:
    """Return the third field of proc_pid_stat(5), after a name that may contain any character."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""  # The thread has ended.
