"""Functions that tell whether a process or a thread is computing, or would if it got a processor."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import sleep

import psutil

_COMPUTING = ("R", "D")
"""States of a thread that runs or waits for a processor, and of a thread that waits for a disk."""
_WATCHED = 0.02
"""Seconds for which threads are watched to see whether they run. The kernel counts running time about every 4 ms."""


def is_computing(pid: int) -> bool:
    """Return True if a thread of the process runs, or waits only for a processor or a disk."""
    if sys.platform == "linux":
        return any(_state(thread) in _COMPUTING for thread in _threads(pid))
    else:  # noqa: RET505 - without `else`, mypy calls these lines unreachable on Linux.
        with suppress(psutil.Error):
            return bool(psutil.Process(pid).status() == psutil.STATUS_RUNNING)
        return False


def held_up(pids: Iterable[int]) -> set[int]:
    """Return the processes of `pids` in which a thread waits for a processor or a disk most of the time; Linux only.

    This takes 20 ms.
    """
    before = {pid: _running_times(pid) for pid in pids}
    sleep(_WATCHED)
    return {
        pid
        for pid, threads in before.items()
        for thread, used in _running_times(pid).items()
        if thread in threads and used - threads[thread] < _WATCHED / 2
    }


def _running_times(pid: int) -> dict[str, float]:
    """Return the seconds for which each thread of the process that is computing has run.

    The first number in the file ``schedstat`` has them in nanoseconds (``Documentation/scheduler/sched-stats.rst``).
    """
    found = {}
    for thread in _threads(pid):
        with suppress(OSError, IndexError):  # The thread has ended, or the kernel counts no time.
            if _state(thread) in _COMPUTING:
                found[thread.name] = int((thread / "schedstat").read_text(encoding="utf-8").split()[0]) / 1e9
    return found


def is_thread_computing(number: int) -> bool:
    """Return True if the thread `number` (`threading.Thread.native_id`) of this process is computing; Linux only."""
    return _state(Path(f"/proc/self/task/{number}")) in _COMPUTING


def _threads(pid: int) -> list[Path]:
    """Return the folder of each thread of the process; none if it has ended."""
    with suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def _state(thread: Path) -> str:
    """Return the third field of proc_pid_stat(5), after a name that may contain any character."""
    try:
        return (thread / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""  # The thread has ended.
