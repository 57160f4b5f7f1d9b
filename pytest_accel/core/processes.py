"""Processes: functions that watch them, that tell whether they compute, and that kill them and their descendants."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from multiprocessing import resource_tracker
from os import _exit, getpgid, getppid, kill, killpg
from pathlib import Path
from signal import SIGKILL
from time import sleep

import psutil

from pytest_accel.core.clock import monotonic
from pytest_accel.core.truncation import cut_end

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_pidfd_open: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
"""The function; None on other systems, and if Python was built with the headers of an old kernel."""
_COMPUTING = ("R", "D")
"""States of a thread that runs or waits for a processor, and of a thread that waits for a disk."""
_WATCHED = 0.02
"""Seconds for which threads are watched to see whether they run. The kernel counts running time about every 4 ms."""
SHM_MANAGER = "torch_shm_manager"
"""Program that torch starts for a process that shares tensors with the strategy ``file_system``.

It removes files that its clients have left in shared memory, and exits 2 s after its last client (torch,
``lib/libshm/manager.cpp``, SHUTDOWN_TIMEOUT).
"""
_TRACKER = re.compile(r"from (multiprocess(ing)?|([\w.]+\.)?loky\.backend)\.resource_tracker import ")
"""Start of the source that resource trackers of Python, of `multiprocess` and of loky run with ``python -c``.

A tracker cleans up and exits after its clients. The module's name elsewhere in a command line proves nothing: it may be
part of a warning filter, which each Python process hands on to its children.
"""
_CLEANING_TIMEOUT = 5.0
"""Seconds within which torch's manager and the trackers must clean up and exit."""
KILL_TIMEOUT = 10.0
"""Seconds in which a process must exit after SIGKILL.

A process that does not is in uninterruptible sleep, as in a driver that hangs, or belongs to another user.
"""
_DESCENDANTS_TIMEOUT = 8.0
"""Seconds for which :func:`kill_descendants` waits: less than the fork server has to exit (`forkserver.client`)."""
MARK = "PYTEST_ACCEL_SESSION"
"""Environment variable of a session's fork servers and all their descendants, see :func:`mark`."""


# Watching


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` exits; exit now if it already has.

    `parent` is the process that forked this process. The forking thread must live as long as `parent`: the kernel
    kills this process when that thread exits.
    """
    _prctl(_PR_SET_PDEATHSIG, SIGKILL)
    if getppid() != parent:
        _exit(1)


def become_subreaper() -> None:
    """Make this process the parent of every descendant whose own parent exits."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_of(pid: int) -> int | None:
    """Return a descriptor that is readable once `pid` has exited (pidfd_open(2)); None if that is impossible."""
    if _pidfd_open is not None:
        with suppress(OSError):
            return _pidfd_open(pid)
    return None


# Computing


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


# Killing


def resource_tracker_pid() -> int | None:
    """Return the pid of the resource tracker that `multiprocessing` has started for this process, or None."""
    return getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)


def children_of(parent: int) -> frozenset[int]:
    """Return the process ids of the children of `parent`."""
    if sys.platform == "linux":
        with suppress(OSError):
            lists = [path.read_text(encoding="utf-8") for path in Path(f"/proc/{parent}/task").glob("*/children")]
            if lists:  # The kernel lacks these files without CONFIG_PROC_CHILDREN.
                return frozenset(int(pid) for pids in lists for pid in pids.split())
    with suppress(psutil.Error):
        return frozenset(child.pid for child in psutil.Process(parent).children())
    return frozenset()


def kill_tree(pid: int) -> None:
    """Kill a process, and the members of its process group and its descendants that do not clean up.

    A process cleans up if :func:`cleans_up` says so. Never raise: the process of another user cannot be killed.
    """
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                if not _cleans_up(process) and process.is_running():
                    _kill(process.pid)
    kill_group(pid)
    _kill(pid)  # Last, so that it does not react to the death of the others. Even if psutil cannot inspect it.


def _kill(pid: int) -> None:
    # psutil's `kill` looks up os.kill, which a test may have replaced.
    with suppress(ProcessLookupError, PermissionError):
        kill(pid, SIGKILL)


def living(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Return the `processes` that have not exited."""
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def may_be_killed(process: psutil.Process) -> bool:
    """Return whether this process may send `process` a signal."""
    try:
        kill(process.pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


def survivors(processes: Iterable[psutil.Process]) -> tuple[str, ...]:
    """Describe the `processes` that have not exited: ``process 71 (sudo tcpdump; user root, sleeping)``."""
    found = []
    for process in sorted(living(processes), key=lambda one: one.pid):
        with suppress(psutil.Error):
            found.append(_describe(process))
    return tuple(found)


def _describe(process: psutil.Process) -> str:
    command, user, state = "?", "unknown", process.status()
    with suppress(psutil.Error):
        command = cut_end(" ".join(process.cmdline()) or process.name(), 80)
    with suppress(psutil.Error):
        user = process.username()
    return f"process {process.pid} ({command}; user {user}, {state})"


def mark(directory: str, server: int) -> str:
    """Return the value of :data:`MARK` for the fork server with the number `server` of the session in `directory`."""
    return f"{directory}/{server}"


def kill_marked(directory: str, server: int | None = None) -> tuple[str, ...]:
    """Kill every process of the session in `directory`, orphans included, but none that :func:`cleans_up`.

    Repeat until none is found. Give up after `KILL_TIMEOUT`, and return the processes that live on. With `server`, kill
    only that fork server and what descends from it. The processes are found by :data:`MARK` in the environment with
    which their program was started.
    """
    deadline = monotonic() + KILL_TIMEOUT
    while True:
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                session, _, number = process.environ().get(MARK, "").rpartition("/")
                is_meant = session == directory and (server is None or number == str(server))
                if is_meant and process.status() != psutil.STATUS_ZOMBIE and not _cleans_up(process):
                    process.kill()
                    found.append(process)
        if not found:
            return ()
        psutil.wait_procs(found, timeout=max(0.0, min(1.0, deadline - monotonic())))
        if monotonic() >= deadline:
            return survivors(found)


def kill_group(pid: int) -> None:
    """Kill the remaining processes of the process group `pid` that do not clean up (:func:`cleans_up`)."""
    looked_at: set[int] = set()
    while new := _members(pid) - looked_at:
        for member in new:
            with suppress(psutil.Error):
                if not _cleans_up(psutil.Process(member)):
                    _kill(member)
        looked_at |= new  # Look again: one of them may have forked before it was killed.


def _members(group: int) -> set[int]:
    """Return the pids of a process group; if it is empty, as it nearly always is, this costs one system call."""
    found: set[int] = set()
    try:
        killpg(group, 0)
    except ProcessLookupError:
        return found
    except PermissionError:
        pass  # All members belong to other users.
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if getpgid(pid) == group:
                found.add(pid)
    return found


def kill_descendants() -> tuple[str, ...]:
    """Kill all descendants of this process and wait until they have exited, at most `_DESCENDANTS_TIMEOUT` seconds.

    Processes that clean up (:func:`cleans_up`) are killed only after `_CLEANING_TIMEOUT`, and the resource tracker of
    this process is never killed. Return the processes that live on. Do not wait for processes of other users.
    """
    tracker = resource_tracker_pid()
    began = monotonic()
    while True:
        waited = monotonic() - began
        descendants = [child for child in psutil.Process().children(recursive=True) if child.pid != tracker]
        children = list(filter(may_be_killed, descendants))
        if not children or waited >= _DESCENDANTS_TIMEOUT:
            return survivors(descendants)
        for child in children:
            with suppress(psutil.Error):
                if waited >= _CLEANING_TIMEOUT or not _cleans_up(child):
                    child.kill()
        psutil.wait_procs(children, timeout=1)


def cleans_up(pid: int) -> bool:
    """Return whether the process `pid` removes resources that other processes have left, and then exits by itself."""
    with suppress(psutil.Error):
        return _cleans_up(psutil.Process(pid))
    return False


def _cleans_up(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.AccessDenied:
        return False
    if command[:1] == [SHM_MANAGER]:
        return True
    return any(flag == "-c" and _TRACKER.match(source) for flag, source in pairwise(command))
