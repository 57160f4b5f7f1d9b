"""Functions that kill processes, process groups and everything that descends from them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import resource_tracker
from os import getpgid, kill, killpg
from signal import SIGKILL

import psutil

from pytest_accel.core.clock import monotonic

SHM_MANAGER = "torch_shm_manager"
"""Program that torch starts for a process that shares tensors with the strategy ``file_system``.

It removes files that its clients have left in shared memory, and exits 2 s after its last client (torch,
``lib/libshm/manager.cpp``, SHUTDOWN_TIMEOUT).
"""
_TRACKERS = ("multiprocessing.resource_tracker", "loky.backend.resource_tracker")
"""Modules of resource trackers, as they occur in command lines. A tracker cleans up and exits after its clients."""
_CLEANING_TIMEOUT = 5.0
"""Seconds within which torch's manager and the trackers must clean up and exit."""
_MARKED_TIMEOUT = 10.0
"""Seconds for which :func:`kill_marked` repeats: a process in uninterruptible sleep survives SIGKILL."""
MARK = "PYTEST_ACCEL_SESSION"
"""Environment variable of a session's fork servers and all their descendants, see :func:`mark`."""


def resource_tracker_pid() -> int | None:
    """Return the pid of the resource tracker that `multiprocessing` has started for this process, or None."""
    return getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)


def kill_tree(pid: int) -> None:
    """Kill a process, its process group and all its descendants, except those that clean up (`_cleans_up`)."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error, ProcessLookupError):
                if not _cleans_up(child) and child.is_running():
                    kill(child.pid, SIGKILL)  # psutil's `kill` looks up os.kill, which a test may have replaced.
    kill_group(pid)
    with suppress(ProcessLookupError):
        kill(pid, SIGKILL)


def mark(directory: str, server: int) -> str:
    """Return the value of :data:`MARK` for the fork server with the number `server` of the session in `directory`."""
    return f"{directory}/{server}"


def session_of(environ: Mapping[str, str]) -> str:
    """Return the folder of the session to which a process with this environment belongs; empty if to none."""
    return environ.get(MARK, "").rpartition("/")[0]


def kill_marked(directory: str, server: int | None = None, owner: int | None = None) -> None:
    """Kill every process of the session in `directory`, orphans included, except those that clean up (`_cleans_up`).

    Repeat until none is found. Give up after `_MARKED_TIMEOUT`. With `server`, kill only that fork server and what
    descends from it; with `owner`, only processes that this user alone controls. The processes are found by
    :data:`MARK` in the environment with which their program was started.
    """
    deadline = monotonic() + _MARKED_TIMEOUT
    while monotonic() < deadline:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environ = process.environ()
                if session_of(environ) != directory or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if server is not None and environ[MARK] != mark(directory, server):
                    continue
                if _cleans_up(process) or (owner is not None and set(process.uids()) != {owner}):
                    continue
                process.kill()
                found.append(process)
        if not found:
            return
        psutil.wait_procs(found, timeout=1)


def kill_group(pid: int) -> None:
    """Kill the remaining processes of the process group `pid`, except those that clean up (`_cleans_up`)."""
    killed: set[int] = set()
    while new := _members(pid) - killed:
        for member in new:
            with suppress(psutil.Error, ProcessLookupError, PermissionError):
                if not _cleans_up(psutil.Process(member)):
                    kill(member, SIGKILL)
        killed |= new  # Look again: one of them may have forked before it was killed.


def _members(group: int) -> set[int]:
    """Return the pids of a process group; if it is empty, as it nearly always is, this costs one system call."""
    found: set[int] = set()
    with suppress(ProcessLookupError, PermissionError):
        killpg(group, 0)
        for pid in psutil.pids():
            with suppress(ProcessLookupError, PermissionError):
                if getpgid(pid) == group:
                    found.add(pid)
    return found


def kill_descendants() -> None:
    """Kill all descendants of this process and wait until they have exited.

    Those that clean up (`_cleans_up`) are killed only after `_CLEANING_TIMEOUT`, and the resource tracker of this
    process is never killed.
    """
    tracker = resource_tracker_pid()
    deadline = monotonic() + _CLEANING_TIMEOUT
    while True:
        children = [child for child in psutil.Process().children(recursive=True) if child.pid != tracker]
        if not children:
            return
        overdue = monotonic() >= deadline
        for child in children:
            with suppress(psutil.Error):
                if overdue or not _cleans_up(child):
                    child.kill()
        psutil.wait_procs(children, timeout=1)


def _cleans_up(process: psutil.Process) -> bool:
    """Return whether `process` removes resources that other processes have left, and then exits by itself."""
    command = process.cmdline()
    return command[:1] == [SHM_MANAGER] or any(tracker in part for part in command for tracker in _TRACKERS)


def identity(pid: int) -> str:
    """Return text that identifies a process of this machine, even if its pid was used by another process before."""
    return f"{pid}-{psutil.Process(pid).create_time()}"
