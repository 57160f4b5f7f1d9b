"""Exit of the fork server: together with its parent, and without leaving processes or files behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from os import _exit

from pytest_accel.core.kill import kill_descendants

_PARENT_CHECK_INTERVAL = 0.5
"""Seconds between two checks that the parent still runs, while nobody reads the connection."""


@contextlib.contextmanager
def ending_with(parent: int, folder: str | None) -> Iterator[None]:
    """Exit as :func:`clean_up` does when `parent` exits, in a block in which nobody reads the connection.

    A timer compares the parent process id. PR_SET_PDEATHSIG would not do: its "parent" is the thread that started this
    process (prctl(2)).
    """

    def check_parent(number: int, frame: object) -> None:
        if os.getppid() != parent:
            clean_up(folder)
            _exit(1)

    before = signal.signal(signal.SIGALRM, check_parent)
    signal.setitimer(signal.ITIMER_REAL, _PARENT_CHECK_INTERVAL, _PARENT_CHECK_INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def clean_up(folder: str | None) -> None:
    """Kill all descendants, and remove the session's `folder`; None: another process removes it."""
    kill_descendants()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
