"""The source lines at which ranks stand, in the style of pytest's tracebacks."""

from __future__ import annotations

import linecache
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_accel.core.frames import Folders, is_library
from pytest_accel.diagnostics.python_stacks import Frame, frames_of_other_threads, frames_of_rank, relevant

_BEFORE = 4
"""Lines of a function that are shown before the current one, in addition to the line with its name."""
_MOST_FRAMES = 30
"""Frames that are shown, at least: outer ones are left out."""


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """One frame, as it is shown."""

    frame: Frame
    long: bool
    """True for pytest's long style, in which the place is below the lines; else it is above the one line."""
    lines: tuple[str, ...]
    """The lines of source; empty if the file cannot be read here."""


def source_entries(frames: Sequence[Frame]) -> list[SourceEntry]:
    """Return what to show of `frames`, given innermost first: the outermost first.

    Libraries that call the user's code are left out. As with ``--tb=auto``, the outermost and the innermost frame of
    the user's code are in the long style.
    """
    kept = (relevant(frames) or list(frames))[:_MOST_FRAMES]
    users = [at for at, frame in enumerate(kept) if frame.is_code and not is_library(frame.path)]
    last = users[-1] if users else len(kept) - 1
    return [_entry(kept[at], long=bool(users) and at in (users[0], last)) for at in range(last, -1, -1)]


def _entry(frame: Frame, *, long: bool) -> SourceEntry:
    linecache.checkcache(frame.path)  # The session may have lasted longer than an edit of the file.
    lines = linecache.getlines(frame.path) if frame.is_code else []
    if not 0 < frame.line <= len(lines):
        return SourceEntry(frame, long=False, lines=())
    if not long:
        return SourceEntry(frame, long=False, lines=(f"    {lines[frame.line - 1].strip()}",))
    return SourceEntry(frame, long=True, lines=tuple(_long_lines(lines, frame)))


def _long_lines(source: Sequence[str], frame: Frame) -> list[str]:
    """Return the lines of a function down to the current one, which is marked."""
    current = frame.line - 1
    name = re.compile(rf"\s*(?:async +)?def +{re.escape(frame.function.rpartition('.')[2])}\b")
    start = next((at for at in range(current, -1, -1) if name.match(source[at])), None)
    first = max(current - _BEFORE, 0 if start is None else start)
    excerpt = [source[at].rstrip() for at in range(first, current + 1)]
    if start is not None and start < first:
        gap = [] if start == first - 1 else [f"{_indent(source[start])}    ..."]
        excerpt = [source[start].rstrip(), *gap, *excerpt]
    *before, last = textwrap.dedent("\n".join(excerpt)).split("\n")
    return [*(f"    {line}".rstrip() for line in before), f">   {last}"]


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _entries_text(entries: Sequence[SourceEntry], folders: Folders) -> list[str]:
    """Return `entries` as lines of text."""
    lines: list[str] = []
    for entry in entries:
        at = entry.frame.where(folders)
        if entry.long:
            lines += [*([""] if lines else []), *entry.lines, "", at]
        else:
            lines += [at, *entry.lines]
    return lines


def stack_text(stack: str, folders: Folders) -> str:
    """Return the source lines at which the rank with this `stack` stands."""
    return "\n".join(_entries_text(source_entries(frames_of_rank(stack)), folders))


def threads_text(stack: str, folders: Folders) -> str:
    """Return the source lines at which the rank's other threads stand that run the user's code."""
    texts = [_entries_text(source_entries(frames), folders) for frames in frames_of_other_threads(stack)]
    return "\n\n".join(map("\n".join, texts))
