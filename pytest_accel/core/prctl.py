"""Linux system calls that watch processes and prevent orphans; no-ops on other systems."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from os import _exit, getppid
from signal import SIGKILL

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_pidfd_open: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
"""The function; None on other systems, and if Python was built with the headers of an old kernel."""


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
