"""Whether a process is computing."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import psutil


def is_at_work(pid: int) -> bool:
    """Return True if a thread of the process runs, or waits only for a processor or a disk.

    The state of a thread is the third field of proc_pid_stat(5), after a name that may contain any character.
    """
    if sys.platform == "linux":
        return any(_state(stat) in ("R", "D") for stat in Path(f"/proc/{pid}/task").glob("*/stat"))
    else:  # noqa: RET505 - without `else`, mypy calls these lines unreachable on Linux.
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(pid).status() == psutil.STATUS_RUNNING)
        return False


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""  # The thread has ended.
