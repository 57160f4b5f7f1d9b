"""Ending processes for good."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing import resource_tracker
from os import getpgid, kill, killpg
from signal import SIGKILL

import psutil

from pytest_accel.core.clock import monotonic

SHM_MANAGER = "torch_shm_manager"
"""The program that torch keeps for a process that shares tensors by the strategy ``file_system``.

It removes what its clients have left in shared memory, and ends by itself 2 s after the last of them (torch,
``lib/libshm/manager.cpp``, SHUTDOWN_TIMEOUT).
"""
_TRACKERS = ("multiprocessing.resource_tracker", "loky.backend.resource_tracker")
"""In the command line of a process that removes what others have left, and ends by itself once they have ended."""
_CLEANING_TIMEOUT = 5.0
"""Seconds that torch's manager and the trackers have for that."""
MARK = "PYTEST_ACCEL_SESSION"
"""The environment variable that a session's fork server has, and all that comes from it: the session's folder."""


def resource_tracker_pid() -> int | None:
    """The process that `multiprocessing` keeps for this one: it ends by itself, having removed what others left."""
    return getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)


def kill_tree(pid: int) -> None:
    """SIGKILL for a process, its process group and every descendant that has left it, but not for what cleans up."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error, ProcessLookupError):
                if not _cleans_up(child) and child.is_running():
                    kill(child.pid, SIGKILL)  # Not psutil's, which takes what a test may have put in os.kill's place.
    kill_group(pid)
    with suppress(ProcessLookupError):
        kill(pid, SIGKILL)


def kill_marked(directory: str) -> None:
    """SIGKILL for every process of the session in `directory`, until there is none: also those that left their parents.

    The environment that is looked at is the one with which a process's program was started.
    """
    while True:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) != directory or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if _cleans_up(process):
                    continue  # It ends by itself, after it has removed what the others left.
                process.kill()
                found.append(process)
        if not found:
            return
        psutil.wait_procs(found, timeout=1)


def kill_group(pid: int) -> None:
    """SIGKILL for what is left of a rank's process group, but not for what cleans up and then ends by itself."""
    killed: set[int] = set()
    while new := _members(pid) - killed:
        for member in new:
            with suppress(psutil.Error, ProcessLookupError, PermissionError):
                if not _cleans_up(psutil.Process(member)):
                    kill(member, SIGKILL)
        killed |= new  # Again, since one of them may have forked meanwhile.


def _members(group: int) -> set[int]:
    """Return the processes of a process group; nearly always there are none, which costs one system call."""
    found: set[int] = set()
    with suppress(ProcessLookupError, PermissionError):
        killpg(group, 0)
        for pid in psutil.pids():
            with suppress(ProcessLookupError, PermissionError):
                if getpgid(pid) == group:
                    found.add(pid)
    return found


def kill_descendants() -> None:
    """SIGKILL for all that came from this process, until there is nothing; only after a time for what cleans up."""
    spared = resource_tracker_pid()
    deadline = monotonic() + _CLEANING_TIMEOUT
    while True:
        children = [child for child in psutil.Process().children(recursive=True) if child.pid != spared]
        if not children:
            return
        overdue = monotonic() >= deadline
        for child in children:
            with suppress(psutil.Error):
                if overdue or not _cleans_up(child):
                    child.kill()
        psutil.wait_procs(children, timeout=1)


def _cleans_up(process: psutil.Process) -> bool:
    """Return whether a process is one that removes what others have left, and ends by itself after that."""
    command = process.cmdline()
    return command[:1] == [SHM_MANAGER] or any(tracker in part for part in command for tracker in _TRACKERS)


def identity(pid: int) -> str:
    """What tells a process from all others of this machine, those that have had its number included."""
    return f"{pid}-{psutil.Process(pid).create_time()}"
