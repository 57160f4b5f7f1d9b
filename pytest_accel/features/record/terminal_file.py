"""Writing to the session's terminal beside pytest, from any thread."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from os import close, dup, get_terminal_size, getpid, write
from threading import Lock
from typing import Any

import pytest

from pytest_accel.compat.pytest_shims import set_terminal_file, terminal_file
from pytest_accel.core.clock import monotonic


class TerminalFile:
    """Stands for the file to which pytest's terminal writer writes, until :meth:`remove`.

    Each text of pytest is passed on at once. What this class writes by itself bypasses pytest's capturing, which
    another thread must not suspend, and leaves the unfinished line as pytest expects it.
    """

    def __init__(self, config: pytest.Config, *, has_status: bool) -> None:
        """Take the descriptor of the terminal, so nothing may be captured. Raise OSError if there is none."""
        self._config = config
        self._file, self._line = terminal_file(config)
        self._writer = config.get_terminal_writer()
        self._width = self._writer.width_of_current_line
        """Columns of the unfinished line; negative if unknown."""
        self._lock = Lock()
        self._pid = getpid()
        if not hasattr(self._file, "fileno"):  # xdist's --looponfail writes to an object of execnet.
            raise OSError("the output has no descriptor")
        self._descriptor = dup(self._file.fileno())
        self.has_status = has_status
        """False: `show_status` is a no-op."""
        self._is_shown = False
        """True if a status is on the screen."""
        self.written_at = monotonic()
        """Time of the last text of pytest."""
        set_terminal_file(config, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write a text of pytest."""
        if getpid() != self._pid:  # A thread of the original process may have held the lock during the fork.
            return int(self._file.write(text))
        with self._lock:
            self._write()
            written = int(self._file.write(text))
            self._file.flush()
            self._line = (self._line + text).rpartition("\n")[2]
            self._width = self._writer.width_of_current_line
            self.written_at = monotonic()
            return written

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write whole lines below the unfinished line, and repeat this below them."""
        with self._lock:
            self._write("".join(["\n" if self._line else "", *(f"{line}\n" for line in lines), self._line]))

    def show_status(self, text: str) -> None:
        """Show `text` below the unfinished line, at whose end the cursor stays, until pytest writes the next text.

        No-op if there is no space.
        """
        with self._lock, suppress(OSError):  # The terminal is closed.
            columns = get_terminal_size(self._descriptor).columns
            width = self._width
            # Not if the cursor is beyond the last column: it could not be put back there.
            if not self.has_status or columns < 2 or width < 0 or (width and width % columns == 0):
                return
            shown = f"\r\x1b[K{text[: columns - 1]}\r"
            self._write(f"\n{shown}\x1b[A\x1b[{width % columns}C" if width else shown)
            self._is_shown = True

    def end_status(self) -> None:
        """Erase the status, and show none any more."""
        with self._lock:
            self.has_status = False
            self._write()

    def _write(self, text: str = "") -> None:
        """Write `text` in place of the status."""
        erasure = "\x1b[J" if self._is_shown else ""  # It erases everything from the cursor on.
        data = (erasure + text).encode(self._file.encoding, "backslashreplace")
        self._is_shown = False
        with suppress(OSError):  # The terminal is closed, which pytest notices by itself; or `remove` was called.
            while data:
                data = data[write(self._descriptor, data) :]

    def remove(self) -> None:
        """Make pytest write to its own file again. What other threads write later is lost."""
        if terminal_file(self._config)[0] is self:  # Otherwise another plugin has replaced it.
            set_terminal_file(self._config, self._file)
        self.end_status()
        with self._lock:
            close(self._descriptor)
            self._descriptor = -1
