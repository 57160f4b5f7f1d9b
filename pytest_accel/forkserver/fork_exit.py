"""Exit of a forked process that runs as an independent process: exit functions, finalizers and children."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import sys
import weakref
from contextlib import suppress
from multiprocessing import process, util
from os import _exit, kill
from signal import SIGKILL
from typing import NoReturn


def disown_exit_functions() -> None:
    """Drop the exit functions inherited from the parent, which runs them itself; run only those registered from now on.

    Call this in a child right after `os.fork`.
    """
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # Set when a process makes its first finalizer. Reset, so that the next finalizer registers the exit function again.
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    # The modules registered these when they were imported; this process needs them as well. They run in reverse order.
    # multiprocessing runs a finalizer only in the process that made it, and its own forks start without children too.
    atexit.register(logging.shutdown)
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    process._children.clear()  # type: ignore[attr-defined]
    kill_children_at_exit()


def kill_children_at_exit() -> None:
    """Have children killed for which multiprocessing would wait forever when this process exits."""
    # Finalizers with a priority run before multiprocessing joins its children; the oldest of one priority runs last.
    util.Finalize(None, _kill_children, exitpriority=0)


def _kill_children() -> None:
    """Kill children for which multiprocessing would wait forever.

    The idle workers of an executor that nobody shut down are such children: only the exit functions of ``threading``,
    which :func:`leave` does not run, would tell them to exit. `multiprocessing` terminates daemonic children itself.
    """
    for child in multiprocessing.active_children():
        if not child.daemon and child.pid is not None:
            with suppress(ProcessLookupError):
                kill(child.pid, SIGKILL)


def leave(code: int) -> NoReturn:
    """Exit a forked child with `code` after its exit functions; leave its parent's resources alone."""
    try:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
    finally:  # Exit whatever is raised: returning from here would run the parent's code in the child.
        _exit(code)
