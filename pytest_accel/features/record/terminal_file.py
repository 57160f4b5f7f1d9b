"""Writing to the session's terminal beside pytest, from any thread."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from os import close, dup, get_terminal_size, getpid, write
from threading import Lock
from typing import Any

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.core.shims import set_terminal_file, terminal_file

_CONTROL_SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)")
"""Sequences such as those for colours, which take no space."""


class TerminalFile:
    """Stands for the file to which pytest's terminal writer writes, until :meth:`remove`.

    Each text of pytest is passed on at once. What this class writes by itself bypasses pytest's capturing, which
    another thread must not suspend, and leaves the unfinished line as pytest expects it.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Take the descriptor of the terminal, so nothing may be captured. Raise OSError if there is none."""
        self._config = config
        self._file, self._line = terminal_file(config)
        self._lock = Lock()
        self._pid = getpid()
        if not hasattr(self._file, "fileno"):  # xdist's --looponfail writes to an object of execnet.
            raise OSError("the output has no descriptor")
        self._descriptor = dup(self._file.fileno())
        self._has_status = False
        """True if a status line is on the screen."""
        self._paused = False
        self._written_at = monotonic()
        set_terminal_file(config, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write a text of pytest."""
        if getpid() != self._pid:  # A thread of the original process may have held the lock during the fork.
            return int(self._file.write(text))
        with self._lock:
            self._erase()
            written = int(self._file.write(text))
            self._file.flush()
            self._line = (self._line + text).rpartition("\n")[2]
            self._written_at = monotonic()
            return written

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write whole lines below the unfinished one, and repeat that below them."""
        with self._lock:
            self._erase()
            self._write("".join(["\n" if self._line else "", *(f"{line}\n" for line in lines), self._line]))

    @property
    def quiet_time(self) -> float:
        """Seconds since the last text of pytest."""
        return monotonic() - self._written_at

    def show_status(self, text: str) -> None:
        """Show `text` below the unfinished line, at whose end the cursor stays, until pytest writes the next text.

        An empty `text` erases the status. No-op if the output is not a terminal, or has no space.
        """
        try:
            columns = get_terminal_size(self._descriptor).columns
        except OSError:
            return
        with self._lock:
            if not text:
                self._erase()
                return
            line = _CONTROL_SEQUENCES.sub("", self._line).rpartition("\r")[2]
            width = sum(
                0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF") for one in line
            )
            # Not if the cursor is beyond the last column: it could not be put back there.
            if self._paused or columns < 2 or (width and width % columns == 0):
                return
            shown = f"\r\x1b[K{text[: columns - 1]}\r"
            self._write(f"\n{shown}\x1b[A\x1b[{width % columns}C" if width else shown)
            self._has_status = True

    def pause(self, paused: bool) -> None:
        """Remove the status, and show none until this is called with False."""
        with self._lock:
            self._paused = paused
            self._erase()

    def _erase(self) -> None:
        if self._has_status:
            self._has_status = False
            self._write("\x1b[J")  # Everything from the cursor on.

    def _write(self, text: str) -> None:
        data = text.encode(self._file.encoding, "backslashreplace")
        with suppress(OSError):  # The terminal is closed, which pytest notices by itself; or `remove` was called.
            while data:
                data = data[write(self._descriptor, data) :]

    def remove(self) -> None:
        """Make pytest write to its own file again. What other threads write later is lost."""
        if terminal_file(self._config)[0] is self:  # Otherwise another plugin has replaced it.
            set_terminal_file(self._config, self._file)
        with self._lock:
            self._erase()
            close(self._descriptor)
            self._descriptor = -1
