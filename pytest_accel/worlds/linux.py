"""The two prctl(2) calls that keep orphans from staying behind; they do nothing where there is no prctl."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when `parent`, the single-threaded process that forked it, ends or has ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Adopt every descendant whose parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
