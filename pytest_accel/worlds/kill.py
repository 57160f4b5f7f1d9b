"""Ending processes for good."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing import resource_tracker
from os import kill, killpg
from signal import SIGKILL

import psutil

from pytest_accel.clock import monotonic

SHM_MANAGER = "torch_shm_manager"
"""The program that torch keeps for a process that shares tensors by the strategy ``file_system``.

It removes what its clients have left in shared memory, and ends by itself 2 s after the last of them (torch,
``lib/libshm/manager.cpp``, SHUTDOWN_TIMEOUT).
"""
_MANAGER_PATIENCE = 5.0
"""Seconds that it has for that."""
MARK = "PYTEST_ACCEL_SESSION"
"""The environment variable that a session's fork server has, and all that comes from it: the session's folder."""


def resource_tracker_pid() -> int | None:
    """The process that `multiprocessing` keeps for this one: it ends by itself, having removed what others left."""
    return getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)


def kill_tree(pid: int) -> None:
    """SIGKILL for a process, its process group and every descendant that has left the group, but torch's manager."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error, ProcessLookupError):
                if not _is_shm_manager(child) and child.is_running():
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
                tracks = any("multiprocessing.resource_tracker" in part for part in process.cmdline())
                if tracks or _is_shm_manager(process):
                    continue  # It ends by itself, after it has removed what the others left.
                process.kill()
                found.append(process)
        if not found:
            return
        psutil.wait_procs(found, timeout=1)


def kill_group(pid: int) -> None:
    """SIGKILL for what is left of a rank's process group."""
    with suppress(ProcessLookupError, PermissionError):
        killpg(pid, SIGKILL)


def kill_descendants() -> None:
    """SIGKILL for all that came from this process, until there is nothing; for torch's manager only after a time."""
    spared = resource_tracker_pid()
    deadline = monotonic() + _MANAGER_PATIENCE
    while True:
        children = [child for child in psutil.Process().children(recursive=True) if child.pid != spared]
        if not children:
            return
        overdue = monotonic() >= deadline
        for child in children:
            with suppress(psutil.Error):
                if overdue or not _is_shm_manager(child):
                    child.kill()
        psutil.wait_procs(children, timeout=1)


def _is_shm_manager(process: psutil.Process) -> bool:
    return process.cmdline()[:1] == [SHM_MANAGER]


def identity(pid: int) -> str:
    """What tells a process from all others of this machine, those that have had its number included."""
    return f"{pid}-{psutil.Process(pid).create_time()}"
