"""Processes and threads that outlive the test that started them.

Runs in ranks only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from gc import collect
from os import getpid, waitid
from threading import Thread, main_thread
from threading import enumerate as living_threads
from time import sleep

import psutil

from pytest_accel.core.clock import monotonic
from pytest_accel.core.processes import (
    SHM_MANAGER,
    children_of,
    is_computing,
    is_thread_computing,
    resource_tracker_pid,
)
from pytest_accel.core.truncation import cut_end
from pytest_accel.messages.rank_messages import Leak, LeakKind

_INTERVAL = 0.005
"""Seconds between two looks at the processes and threads that may still end."""
_GRACE = 40
"""Number of looks in a row at which no process or thread computes, after which the test has left them running.

The workers of an iterator or a thread at its last line need this time. It is counted in looks because on a busy machine
they get no more of the processor than this process does.
"""
_LONGEST_GRACE = 5.0
"""Seconds after which the test has left processes and threads running even if they compute."""
_LIBRARIES = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "multiprocess.forkserver",
    "multiprocess.resource_tracker",
    "torch/_inductor/compile_worker",
    "loky.backend.",  # joblib's reusable executor and its tracker; also matches `joblib.externals.loky`.
    "wandb-core",
    "debugpy",
    SHM_MANAGER,
)
"""Texts in the command lines of processes that a library keeps until its process exits, and terminates itself."""
_EXECUTOR = os.path.join("concurrent", "futures", "thread.py")
"""End of the path of the module with the function that workers of a `ThreadPoolExecutor` run."""
_LOKY = "loky.process_executor"
"""End of the name of the module with the threads of loky's reusable executor. They keep running with its processes."""


Spawned = frozenset[int | Thread]
"""Running child processes (by process id), and non-daemon threads, for which the interpreter would wait at exit."""


def find() -> Spawned:
    """Return the running children and non-daemon threads of this process.

    On Linux, the children include orphaned descendants, because a rank is a subreaper.
    """
    me = main_thread()
    return _children().union(thread for thread in living_threads() if not thread.daemon and thread is not me)


def _children() -> frozenset[int]:
    try:
        waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()  # The usual case, for which waitid() is the cheapest check.
    return children_of(getpid())


def left_running(spawned: Spawned) -> list[Leak]:
    """Return a leak for each of the processes and threads that does not end by itself soon.

    Processes with a text of `_LIBRARIES` in their command lines, and idle threads of executors, are left out.
    """
    if not spawned:
        return []
    collect()
    deadline = monotonic() + _LONGEST_GRACE
    idle = 0
    while True:
        children = _running(one for one in spawned if isinstance(one, int))
        threads = [one for one in spawned if isinstance(one, Thread) and one.is_alive() and not _may_stay(one)]
        if not (children or threads) or idle == _GRACE or monotonic() > deadline:
            break
        computing = any(map(_is_tree_computing, children)) or any(
            is_thread_computing(one.native_id or 0) for one in threads
        )
        idle = 0 if computing else idle + 1
        sleep(_INTERVAL)
    return [
        *(Leak(LeakKind.PROCESS, cut_end(words, 80), number=pid) for pid, words in children.items()),
        *(Leak(LeakKind.THREAD, thread.name) for thread in threads),
    ]


def _running(pids: Iterable[int]) -> dict[int, str]:
    """Return the command lines of the running processes of `pids` that no library keeps."""
    found = {}
    for pid in sorted(pids):
        with suppress(psutil.Error):
            child = psutil.Process(pid)
            words = " ".join(child.cmdline()) or child.name()
            is_of_library = pid == resource_tracker_pid() or any(text in words for text in _LIBRARIES)
            if child.status() != psutil.STATUS_ZOMBIE and not is_of_library:
                found[pid] = words
    return found


def _is_tree_computing(pid: int) -> bool:
    """Return whether the process or a descendant, for which it may wait, computes."""
    return is_computing(pid) or any(map(_is_tree_computing, children_of(pid)))


def _may_stay(thread: Thread) -> bool:
    """Return whether `thread` cannot disturb the next test: loky's, or an executor's worker that waits for work."""
    if type(thread).__module__.endswith(_LOKY):
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    code = frame.f_code if frame is not None else None
    return code is not None and code.co_name == "_worker" and code.co_filename.endswith(_EXECUTOR)
