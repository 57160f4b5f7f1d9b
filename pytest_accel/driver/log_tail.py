"""What the ranks of a world write, shown in the driver while the test runs.

The ranks write to files, which the driver reads: no rank waits for the terminal, and no amount of output is held in
memory.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

from pytest_accel.core.paths import HEADING
from pytest_accel.diagnostics.inspector import RankLog, WorldInspector

_CHUNK = 1 << 16
"""Bytes read at once; a line that is longer is cut."""
_BACKLOG = 1 << 23
"""Bytes by which a rank may be ahead of the terminal. What is more is left out."""
_ENDS = re.compile(rb"\r\n|\n|\r(?!\Z)")
_HEADINGS = re.compile(rb"(?m)^" + re.escape(HEADING.encode()) + rb".*\n")


class _RankOutput:
    """One rank's log, read as it grows."""

    def __init__(self, log: RankLog, prefix: str) -> None:
        """`prefix` stands before each line; where it is empty, what comes is passed on as it is."""
        self.log = log
        self.offset = log.size()
        self._prefix = prefix
        self._rest = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """What is new, at most a chunk; empty where there is nothing."""
        note = self._skip()
        data = self.log.read(self.offset, _CHUNK)
        self.offset += len(data)
        return note + self._lines(_HEADINGS.sub(b"", data)) if data else ""

    def _skip(self) -> str:
        left_out = self.log.size() - _BACKLOG - self.offset
        if left_out <= 0:
            return ""
        self.offset += left_out + _BACKLOG - _CHUNK
        return f"{self.end()}{self._prefix}[… {left_out + _BACKLOG - _CHUNK} bytes left out …]\n"

    def _lines(self, data: bytes) -> str:
        if not self._prefix:
            return self._decoder.decode(data)
        *lines, self._rest = _ENDS.split(self._rest + data)
        if len(self._rest) > _CHUNK:
            lines.append(self._rest)
            self._rest = b""
        return "".join(f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines)

    def end(self) -> str:
        """The unfinished line."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return f"{self._prefix}{rest.decode(errors='replace')}\n" if rest else ""


class Streams:
    """The output of all ranks of a world."""

    def __init__(self, inspector: WorldInspector, ranks: int, show: Callable[[str], None], *, kept: bool) -> None:
        """`kept`: the logs are a person's too. Otherwise they are cut to nothing after each test."""
        self._kept = kept
        self._show = show
        self._begun = False
        self._ranks = [
            _RankOutput(RankLog(inspector, rank), f"[rank {rank}] " if ranks > 1 else "") for rank in range(ranks)
        ]

    def show(self) -> bool:
        """Show what is new, a piece from each rank; whether there was something."""
        shown = [self._put(rank.read()) for rank in self._ranks]
        return any(shown)

    def drain(self) -> None:
        """Show all whole lines that are there now; a rank that goes on writing is not followed any further."""
        for rank in self._ranks:
            end = rank.log.size()
            before = -1
            while before < rank.offset < end:  # It does not move where a test has removed the file, or cut it.
                before = rank.offset
                self._put(rank.read())

    def finish(self) -> None:
        """The test has ended: show all that is there."""
        self.drain()
        for rank in self._ranks:
            self._put(rank.end())
            if not self._kept:
                rank.log.cut()
                rank.offset = 0
        self._begun = False

    def _put(self, text: str) -> bool:
        if text and not self._begun and len(self._ranks) > 1:
            text = f"\n{text}"  # Behind the test's name, which stands in an unfinished line.
        self._begun = self._begun or bool(text)
        if text:
            self._show(text)
        return bool(text)
