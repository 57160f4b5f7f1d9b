"""Processes and threads that a test has started and that outlive it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from gc import collect
from os import waitid, waitpid
from pathlib import Path
from threading import Thread, main_thread
from threading import enumerate as living_threads
from time import sleep
from typing import NamedTuple

import psutil

from pytest_accel.core.clock import monotonic
from pytest_accel.core.kill import SHM_MANAGER, kill_tree, resource_tracker_pid

_PATIENCE = 0.2
"""Seconds in which what is about to end may do so: an iterator's workers, a thread at its last line."""
_LIBRARIES = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "torch/_inductor/compile_worker",
    "loky.backend.",  # joblib's reusable executor and its tracker, as `joblib.externals.loky` too.
    "wandb-core",
    SHM_MANAGER,
)
"""Texts in the command lines of processes that a library keeps for the life of its process, and ends itself."""
_EXECUTOR = os.path.join("concurrent", "futures", "thread.py")
_LOKY = "loky.process_executor"
"""End of the name of the module whose threads manage loky's reusable executor, which is kept with its processes."""


class Strays(NamedTuple):
    """What has been started and runs."""

    children: frozenset[int] = frozenset()
    threads: frozenset[Thread] = frozenset()
    """Those that the interpreter would wait for at its end."""

    def __or__(self, other: Strays) -> Strays:
        return Strays(self.children | other.children, self.threads | other.threads)

    def __sub__(self, other: Strays) -> Strays:
        return Strays(self.children - other.children, self.threads - other.threads)


def find() -> Strays:
    """This process's children, which on Linux are all that it has started and that lost their parents, and threads."""
    me = main_thread()
    threads = frozenset(thread for thread in living_threads() if not thread.daemon and thread is not me)
    return Strays(_children(), threads)


def _children() -> frozenset[int]:
    try:
        waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()  # Nearly always, and the cheapest question there is.
    if sys.platform == "linux":
        with suppress(OSError):
            lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
            if lists:  # Not there without CONFIG_PROC_CHILDREN.
                return frozenset(int(pid) for pids in lists for pid in pids.split())
    return frozenset(child.pid for child in psutil.Process().children())


def end(known: Strays, kept: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """End what is not `known`; what is told of it: of what has been ended, and of what could not be.

    Processes with one of the texts `kept` in their command lines are left running, as those of `_LIBRARIES` are.
    """
    new = find() - known
    if not any(new):
        return [], []
    deadline = monotonic() + _PATIENCE
    collect()
    while (children := _running(new.children, (*_LIBRARIES, *kept))) and monotonic() < deadline:
        sleep(0.005)
    threads = [thread for thread in new.threads if not type(thread).__module__.endswith(_LOKY)]
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
    told = [f"left process {child.pid} running ({_name(child)}); it has been killed" for child in children]
    for child in children:
        kill_tree(child.pid)
        with suppress(ChildProcessError):
            waitpid(child.pid, 0)
    busy = [thread for thread in threads if thread.is_alive() and not _is_idle_worker(thread)]
    return told, [f"left the thread {thread.name!r} running" for thread in busy]


def _running(pids: frozenset[int], kept: tuple[str, ...]) -> list[psutil.Process]:
    """Return the living processes of `pids` that have none of the texts `kept` in their command lines."""
    found = []
    for pid in sorted(pids):
        with suppress(psutil.Error):
            child = psutil.Process(pid)
            words = " ".join(child.cmdline())
            if (
                child.status() != psutil.STATUS_ZOMBIE
                and pid != resource_tracker_pid()
                and not any(text in words for text in kept)
            ):
                found.append(child)
    return found


def _name(child: psutil.Process) -> str:
    with suppress(psutil.Error):
        words = " ".join(child.cmdline()) or child.name()
        return words if len(words) <= 80 else f"{words[:79]}…"
    return "?"


def _is_idle_worker(thread: Thread) -> bool:
    """Whether it is one of an executor's that waits for work: such a one does nothing until it is asked to."""
    frame = sys._current_frames().get(thread.ident or 0)
    code = frame.f_code if frame is not None else None
    return code is not None and code.co_name == "_worker" and code.co_filename.endswith(_EXECUTOR)
