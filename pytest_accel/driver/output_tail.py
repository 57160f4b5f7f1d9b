"""Shows in the driver what the ranks of a world write (``-s``), or what pytest shows in them, while a test runs.

The ranks write to files, and the driver reads these: no rank waits for the terminal, and output is not held in memory.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Callable

import pytest

from pytest_accel.compat.pytest_shims import shows_live_logs
from pytest_accel.core.paths import HEADING
from pytest_accel.core.rank_names import line_prefix
from pytest_accel.diagnostics.inspector import BACKLOG, CHUNK, Growing, MachineInspector, WorldInspector
from pytest_accel.settings.options import is_distributed

_LINE_ENDS = re.compile(r"\r\n|\n|\r(?!\Z)")
_HEADINGS = re.compile(re.escape(HEADING) + r".*\n")


def shows_output(config: pytest.Config) -> bool:
    """Return whether this process shows the output of ranks while they run (``-s``). A worker has no terminal."""
    return getattr(config.option, "capture", "no") == "no" and not is_distributed(config)


def shows_logs_of_ranks(config: pytest.Config) -> bool:
    """Return whether this process shows live logs or fixtures of ranks (``log_cli``, ``--setup-show``), without ``-s``.

    With ``-s``, they are a part of the output of ranks.
    """
    if is_distributed(config) or shows_output(config) or not config.pluginmanager.has_plugin("terminalreporter"):
        return False
    return shows_live_logs(config) or bool(getattr(config.option, "setupshow", False))


class _RankText:
    """The output of one rank, as far as it has been read."""

    def __init__(self, prefix: str) -> None:
        """Put `prefix` before each line. An empty prefix leaves the output unchanged."""
        self.offset = 0
        self._prefix = prefix
        self._unfinished = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, begin: int, data: bytes) -> str:
        """Return the text to show once `data`, which stands at the offset `begin` of the file, has been read."""
        note = f"{self.end()}{self._prefix}[… {begin - self.offset} bytes left out …]\n" if begin > self.offset else ""
        self.offset = begin + len(data)
        text = _HEADINGS.sub("", self._decoder.decode(data))
        if self._prefix:
            *lines, self._unfinished = _LINE_ENDS.split(self._unfinished + text)
            text = "".join(f"{self._prefix}{line}\n" for line in lines)
            if len(self._unfinished) > CHUNK:
                text += self.end()
        return note + text

    def end(self) -> str:
        """Return the unfinished line, and forget it."""
        rest, self._unfinished = self._unfinished.rstrip("\r"), ""
        return f"{self._prefix}{rest}\n" if rest else ""


class OutputTail:
    """Shows the growing files of a world's ranks, each line with its rank. Owned by the driver's `World`."""

    def __init__(
        self, inspector: WorldInspector, file: Growing, ranks: int, show: Callable[[str], None], *, warm: bool
    ) -> None:
        """Pass text of each rank's `file` to `show`, from its end if an earlier driver has had the world (`warm`)."""
        self._inspector = inspector
        self._file = file
        self._show = show
        self._ranks = {rank: _RankText(line_prefix(rank, ranks)) for rank in range(ranks)}
        if warm:
            for rank, (begin, data) in self._read(sys.maxsize).items():
                self._ranks[rank].offset = begin + len(data)

    def _read(self, offset: int | None = None) -> dict[int, tuple[int, bytes]]:
        offsets = {rank: (self._file, text.offset if offset is None else offset) for rank, text in self._ranks.items()}
        return self._inspector.ask(MachineInspector.pieces, offsets)

    def show(self) -> bool:
        """Pass on the next text of each rank, and return whether there is more."""
        found = self._read()
        for rank, (begin, data) in found.items():
            if text := self._ranks[rank].take(begin, data):
                self._show(text)
        return any(len(data) == CHUNK for _, data in found.values())

    def drain(self) -> None:
        """Pass on all that the ranks have written, with the lines that have no end. A rank may go on writing."""
        for _ in range(BACKLOG // CHUNK + 1):
            if not self.show():
                break
        for text in self._ranks.values():
            if rest := text.end():
                self._show(rest)
