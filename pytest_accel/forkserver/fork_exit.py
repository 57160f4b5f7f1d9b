"""The end of a process that was forked and goes on as one of its own."""

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
    """Leave to the process that this one was copied from what it has to do at its end; what is to come is our own."""
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # Set with the first finalizer of a process: the next one registers anew.
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    # These were registered when they were imported, and are for what this process will make, too: the last one begins.
    # multiprocessing's finalizers run only in the process that has made them, and its forks know no children either.
    atexit.register(logging.shutdown)
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    process._children.clear()  # type: ignore[attr-defined]
    # Of all that run before it waits for its children, the one that was made first runs last.
    util.Finalize(None, _kill_children, exitpriority=0)


def _kill_children() -> None:
    """An executor that nobody has shut down has some that wait for work: only ``threading`` would tell them to end.

    `multiprocessing` would wait for them. Those that are daemons it ends itself.
    """
    for child in multiprocessing.active_children():
        if not child.daemon and child.pid is not None:
            with suppress(ProcessLookupError):
                kill(child.pid, SIGKILL)


def leave(code: int) -> NoReturn:
    """End a forked child as an interpreter would end, except for what belongs to the process it was copied from."""
    try:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
    finally:  # Whatever the process has been brought to raise: what it was copied from goes on behind this.
        _exit(code)
