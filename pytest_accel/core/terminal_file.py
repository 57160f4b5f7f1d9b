"""Writing to the session's terminal beside pytest, from any thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from pytest_accel.core.shims import set_terminal_file, terminal_file


class TerminalFile:
    """Stands for the file to which pytest's terminal writer writes, until :meth:`remove`.

    Each text of pytest is passed on at once, so that it is on the terminal before anything that this class writes by
    itself. The latter bypasses pytest's capturing, which another thread must not suspend, and leaves the unfinished
    line as pytest expects it.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Raise OSError if the file has no descriptor.

        Make this object while nothing is captured: then the descriptor is that of the terminal.
        """
        self._config = config
        self._file, self._line = terminal_file(config)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._descriptor = os.dup(self._file.fileno())
        set_terminal_file(config, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write a text of pytest."""
        if os.getpid() != self._pid:  # A thread of the original process may have held the lock during the fork.
            return int(self._file.write(text))
        with self._lock:
            written = int(self._file.write(text))
            self._file.flush()
            self._line = (self._line + text).rpartition("\n")[2]
            return written

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write whole lines below the unfinished one, and repeat that below them."""
        with self._lock:
            self._write("".join(["\n" if self._line else "", *(f"{line}\n" for line in lines), self._line]))

    def _write(self, text: str) -> None:
        data = text.encode(self._file.encoding, "backslashreplace")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def remove(self) -> None:
        """Make pytest write to its own file again. No other method may be called after this one."""
        if terminal_file(self._config)[0] is self:  # Otherwise another plugin has replaced it.
            set_terminal_file(self._config, self._file)
        os.close(self._descriptor)
