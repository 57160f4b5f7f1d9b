"""The source lines at which ranks stand, in the short style of pytest's tracebacks."""

from __future__ import annotations

import linecache
from collections.abc import Sequence

from pytest_accel.core.frames import Folders, is_library
from pytest_accel.diagnostics.python_stacks import Frame, frames_of_other_threads, frames_of_rank, relevant

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
