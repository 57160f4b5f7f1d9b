"""Shows in the driver what the ranks of a world write (``-s``), or what pytest shows in them, while a test runs.

The ranks write to files, and the driver reads these: no rank waits for the terminal, and output is not held in memory.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection

import pytest

from pytest_accel.compat.pytest_shims import shows_live_logs
from pytest_accel.core.clock import monotonic
from pytest_accel.core.session_folder import HEADING, RankFile, ShownFile
from pytest_accel.core.truncation import line_prefix
from pytest_accel.diagnostics.inspector import CHUNK, MachineInspector, WorldInspector
from pytest_accel.settings.options import is_distributed

_LINE_ENDS = re.compile(r"\r\n|\n|\r(?!\Z)")
_LONGEST_DRAIN = 10.0
"""Seconds for which output is shown after a phase. A child process of a rank may write without an end."""
_HEADINGS = re.compile(re.escape(HEADING) + r".*\n")


def shown_file(config: pytest.Config) -> ShownFile | None:
    """Return the file of each rank that this process shows while it grows; None if it shows nothing of ranks.

    With ``-s``, it is the output, which includes live logs and fixtures (``log_cli``, ``--setup-show``), else these. A
    worker has no terminal.
    """
    if is_distributed(config):
        return None
    if getattr(config.option, "capture", "no") == "no":
        return "output"
    is_shown = shows_live_logs(config) or getattr(config.option, "setupshow", False)
    return "terminal" if is_shown and config.pluginmanager.has_plugin("terminalreporter") else None


class _RankText:
    """The output of one rank, as far as it has been read."""

    def __init__(self, prefix: str) -> None:
        """Put `prefix` before each line. An empty prefix leaves the output unchanged."""
        self.offset = 0
        self._prefix = prefix
        self._unfinished = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, data: bytes) -> str:
        """Return the text to show once `data`, the next part of the file, has been read."""
        self.offset += len(data)
        text = _HEADINGS.sub("", self._decoder.decode(data))
        if self._prefix:
            *lines, self._unfinished = _LINE_ENDS.split(self._unfinished + text)
            text = "".join(f"{self._prefix}{line}\n" for line in lines)
            if len(self._unfinished) > CHUNK:
                text += self.end()
        return text

    def end(self) -> str:
        """Return the unfinished line, and forget it."""
        rest, self._unfinished = self._unfinished.rstrip("\r"), ""
        return f"{self._prefix}{rest}\n" if rest else ""


class OutputTail:
    """Shows the growing files of a world's ranks, each line with its rank. Owned by the `Driver`."""

    def __init__(self, inspector: WorldInspector, file: ShownFile, ranks: int, show: Callable[[str], None]) -> None:
        """Pass the text of each rank's `file` to `show`."""
        self._inspector = inspector
        self._file = file
        self._show = show
        self._ranks = {rank: _RankText(line_prefix(rank, ranks)) for rank in range(ranks)}

    def show(self) -> bool:
        """Pass on the next text of each rank, and return whether there is more."""
        offsets: dict[int, tuple[RankFile, int]] = {rank: (self._file, one.offset) for rank, one in self._ranks.items()}
        found = self._inspector.ask(MachineInspector.pieces, offsets)
        for rank, data in found.items():
            if text := self._ranks[rank].take(data):
                self._show(text)
        return any(len(data) == CHUNK for data in found.values())

    def drain(self, ended: Collection[int]) -> None:
        """Pass on all that the ranks have written, with the unfinished lines of the ranks that have `ended` the test.

        The other ranks may be in a later phase already, and may go on writing.
        """
        deadline = monotonic() + _LONGEST_DRAIN
        while self.show() and monotonic() < deadline:
            pass
        for rank in ended:
            if rest := self._ranks[rank].end():
                self._show(rest)
