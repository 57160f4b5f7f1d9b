"""Shows the output of a world's ranks in the driver while a test runs.

The ranks write to files, and the driver reads these: no rank waits for the terminal, and output is not held in memory.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Protocol

from pytest_accel.core.paths import HEADING
from pytest_accel.core.rank_names import line_prefix
from pytest_accel.diagnostics.inspector import LogReader, WorldInspector

CHUNK = 1 << 16
"""Bytes that one read returns at most. Longer lines are split."""
BACKLOG = 1 << 23
"""Bytes by which a rank may be ahead of the terminal. If it is further ahead, output is left out."""
_LINE_ENDS = re.compile(rb"\r\n|\n|\r(?!\Z)")
_HEADINGS = re.compile(rb"(?m)^" + re.escape(HEADING.encode()) + rb".*\n")


class Tail(Protocol):
    """Passes on what the ranks of a world write. Owned by the driver's `World`."""

    def show(self) -> bool:
        """Pass on the next text, and return whether there may be more."""

    def drain(self) -> None:
        """Pass on what the ranks have written in the phase that has ended. A rank that keeps writing is no delay."""

    def finish(self) -> None:
        """Pass on all text of a test that has ended."""

    def close(self) -> None:
        """Pass on all text, before the world is given back."""


class _RankOutput:
    """The log of one rank, read while the rank writes it."""

    def __init__(self, log: LogReader, prefix: str) -> None:
        """Put `prefix` before each line. An empty prefix leaves the output unchanged."""
        self.log = log
        self.offset = log.size()
        self._prefix = prefix
        self._unfinished = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """Return the next output, at most one chunk; empty if there is none."""
        note = self._skip()
        data = self.log.read(self.offset, CHUNK)
        self.offset += len(data)
        return note + self._lines(_HEADINGS.sub(b"", data)) if data else ""

    def _skip(self) -> str:
        """Skip to the last chunk if the backlog is too long; return a note on the bytes left out."""
        excess = self.log.size() - BACKLOG - self.offset
        if excess <= 0:
            return ""
        left_out = excess + BACKLOG - CHUNK
        self.offset += left_out
        return f"{self.end()}{self._prefix}[… {left_out} bytes left out …]\n"

    def _lines(self, data: bytes) -> str:
        if not self._prefix:
            return self._decoder.decode(data)
        *lines, self._unfinished = _LINE_ENDS.split(self._unfinished + data)
        if len(self._unfinished) > CHUNK:
            lines.append(self._unfinished)
            self._unfinished = b""
        return "".join(f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines)

    def end(self) -> str:
        """Return the unfinished line, and forget it."""
        rest, self._unfinished = self._unfinished.rstrip(b"\r"), b""
        return f"{self._prefix}{rest.decode(errors='replace')}\n" if rest else ""


class LogTail(Tail):
    """Shows the output of all ranks of a world."""

    def __init__(self, inspector: WorldInspector, ranks: int, show: Callable[[str], None], *, kept: bool) -> None:
        """Pass output to `show`. Unless the user keeps the logs (`kept`), they are truncated after each test."""
        self._kept = kept
        self._show = show
        self._ranks = [
            _RankOutput(LogReader(inspector, rank, "log"), line_prefix(rank, ranks)) for rank in range(ranks)
        ]

    def show(self) -> bool:
        shown = [self._show_text(rank.read()) for rank in self._ranks]
        return any(shown)

    def drain(self) -> None:
        """Show all whole lines that the ranks have written until now."""
        for rank in self._ranks:
            end = rank.log.size()
            before = -1
            while before < rank.offset < end:  # The offset stays if a test has removed or truncated the file.
                before = rank.offset
                self._show_text(rank.read())

    def finish(self) -> None:
        self.drain()
        for rank in self._ranks:
            self._show_text(rank.end())
            if not self._kept:
                rank.log.truncate()
                rank.offset = 0

    def close(self) -> None:
        self.finish()

    def _show_text(self, text: str) -> bool:
        """Show `text`; return whether it is not empty."""
        if text:
            self._show(text)
        return bool(text)
