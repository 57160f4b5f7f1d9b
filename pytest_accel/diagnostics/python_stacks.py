"""The Python stacks of ranks: taken on a signal or written in a crash, the frames in them, and their source lines.

A stack is the text that faulthandler writes (``Modules/faulthandler.c``, ``Python/traceback.c``): the threads, newest
first, each with its innermost frame first.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pytest_accel.core.clock import monotonic
from pytest_accel.core.frames import PACKAGE, Folders, is_library
from pytest_accel.core.processes import held_up, is_computing

_INTERVAL = 0.02
"""Seconds between two looks at the files that stacks are written to."""
_LONGEST = 10.0
"""Seconds that a process has to write its stack while it waits for a processor."""
_LOOKS = 5
"""Number of looks at which the files of a computing process must not have changed.

The process may have been interrupted while it wrote. A process that waits has written all.
"""
_HIDDEN = (
    *(f"{os.sep}{name}{os.sep}" for name in ("_pytest", "pluggy")),
    os.path.join("torch", "distributed", "c10d_logger.py"),
    os.path.join("torch", "utils", "_contextlib.py"),
    PACKAGE,
)
"""Path parts of files whose frames say nothing about the test: of pytest, of torch's decorators, of this package."""
_LINK_TO_DRIVER = os.path.join(PACKAGE, "rank", "link_to_driver.py")
FATAL = "Fatal Python error: "
"""The beginning of the stacks that faulthandler writes when the process crashes."""
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) (?:0x)?[0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Frame(NamedTuple):
    """A frame of a Python stack."""

    path: str
    line: int
    function: str

    @property
    def is_code(self) -> bool:
        """False for code that is in no file, such as ``<frozen os>``."""
        return not self.path.startswith("<")

    def place(self, folders: Folders) -> str:
        """Return ``file:line`` of the frame, relative to rootdir."""
        return f"{folders.shown(self.path)}:{self.line}"

    def where(self, folders: Folders) -> str:
        """Return ``file:line in function`` of the frame, relative to rootdir."""
        return f"{self.place(folders)} in {self.function}"


def take_stacks(pids: dict[int, int], paths: dict[int, str], stack_signal: int, timeout: float = 2.0) -> dict[int, str]:
    """Return the Python stacks of all threads of the processes `pids`, by rank; empty if a rank did not answer.

    The signal handler is faulthandler's, written in C: it does not need the GIL, so it works during a native call that
    holds the GIL. A process that waits for a processor has longer than `timeout` seconds.
    """
    before = {rank: _size(path) for rank, path in paths.items()}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, stack_signal)
    began = monotonic()
    sizes = dict(before)
    unchanged = 0
    while unchanged < (_LOOKS if any(map(is_computing, pids.values())) else 1) and (
        (passed := monotonic() - began) < timeout
        or (passed < _LONGEST and held_up(pid for rank, pid in pids.items() if sizes[rank] == before[rank]))
    ):
        time.sleep(_INTERVAL)
        now = {rank: _size(path) for rank, path in paths.items()}
        unchanged = unchanged + 1 if now == sizes and all(now[rank] > before[rank] for rank in now) else 0
        sizes = now
    stacks = {}
    for rank, path in paths.items():
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(before[rank])
            stacks[rank] = file.read().decode(errors="replace").strip("\n")
    return stacks


def _frames(text: str) -> list[Frame]:
    return [Frame(path, int(line), function) for path, line, function in _FRAME.findall(text)]


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def frames_of_rank(stack: str) -> list[Frame]:
    """Return the frames of the rank's main thread, or of the thread that crashed, innermost first."""
    _, *threads = _THREAD.split(stack)
    if stack.startswith(FATAL):
        threads = [thread for thread in threads if thread.startswith("Current")] or threads
    return _frames(threads[-1]) if threads else []


def frames_of_other_threads(stack: str) -> list[list[Frame]]:
    """Return the frames of each thread that `frames_of_rank` leaves out and that runs the user's code."""
    _, *threads = _THREAD.split(stack)
    found, own = [_frames(thread) for thread in threads], frames_of_rank(stack)
    return [frames for frames in found if frames != own and where(frames) is not None]


def has_finished(frames: Iterable[Frame]) -> bool:
    """Return whether the rank with these `frames` has finished its test: it waits for the next test or driver."""
    waits = ("receive", "__init__")
    return any(frame.path == _LINK_TO_DRIVER and frame.function in waits for frame in frames)


def relevant(frames: Iterable[Frame]) -> list[Frame]:
    """Return `frames` without frames that say nothing about the test."""
    return [frame for frame in frames if frame.is_code and not any(part in frame.path for part in _HIDDEN)]


def where(frames: Iterable[Frame], folders: Folders = Folders()) -> Frame | None:  # noqa: B008 - immutable.
    """Return the innermost of `frames` that is in rootdir; else the innermost that is in no library, or None."""
    users = [frame for frame in frames if frame.is_code and not is_library(frame.path)]
    return next((frame for frame in users if folders.is_own(frame.path)), users[0] if users else None)


_MOST_FRAMES = 30
"""Maximum number of frames that are shown: outer frames are left out."""


def shown_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames to show, outermost first; `frames` are innermost first.

    Libraries that call the user's code are left out.
    """
    kept = (relevant(frames) or list(frames))[:_MOST_FRAMES]
    users = [at for at, frame in enumerate(kept) if frame.is_code and not is_library(frame.path)]
    return kept[: users[-1] + 1 if users else None][::-1]


def source_of(frame: Frame) -> list[str]:
    """Return the line of source of `frame`, or an empty list if it cannot be read here."""
    linecache.checkcache(frame.path)  # The session may have lasted longer than an edit of the file.
    line = linecache.getline(frame.path, frame.line).strip() if frame.is_code else ""
    return [f"    {line}"] if line else []


def _text(frames: Sequence[Frame], folders: Folders) -> str:
    return "\n".join(line for frame in shown_frames(frames) for line in (frame.where(folders), *source_of(frame)))


def stack_text(stack: str, folders: Folders) -> str:
    """Return the source lines at which the rank with this `stack` stands."""
    return _text(frames_of_rank(stack), folders)


def threads_text(stack: str, folders: Folders) -> str:
    """Return the source lines at which the rank's other threads stand that run the user's code."""
    return "\n\n".join(_text(frames, folders) for frames in frames_of_other_threads(stack))
