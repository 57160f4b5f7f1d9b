"""A rank's log, to which file descriptors 1 and 2 write. The user may keep it (``--accel-logs``)."""

from __future__ import annotations

import ctypes
import io
import os
import sys
from contextlib import suppress
from os import stat, truncate
from os.path import relpath

from pytest_accel.core.paths import HEADING, kept_log_path, log_path
from pytest_accel.core.rank_messages import NodeRef
from pytest_accel.core.session_spec import SessionSpec

_open = open  # A test may replace it.


def redirect(session: SessionSpec, world: int, rank: int) -> None:
    """Make file descriptors 1 and 2 write to the rank's log, and 0 read from the null device."""
    path = log_path(session.directory, world, rank)
    if session.logs is not None:
        os.makedirs(session.logs, exist_ok=True)
        kept = kept_log_path(session.logs, world, rank)
        with suppress(FileNotFoundError):
            os.unlink(kept)
        os.symlink(kept, path)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)


class RankLog:
    """The log of this rank: writes headings and missing line ends to it, flushes it, and empties it between tests."""

    def __init__(self, session: SessionSpec, world: int, rank: int, ranks: int) -> None:
        self._path = log_path(session.directory, world, rank)
        self._kept = session.logs is not None
        self._streams = session.streams
        self._ends_lines = session.streams and ranks > 1
        self._root = session.invocation_dir
        self._libc = ctypes.CDLL(None) if self._kept or self._streams else None

    def open(self) -> None:
        """Make Python and C write each line at once, if the log is kept or shown while the test runs."""
        if self._libc is None:
            return
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        with suppress(ValueError, AttributeError):
            name = "__stdoutp" if sys.platform == "darwin" else "stdout"
            self._libc.setvbuf(ctypes.c_void_p.in_dll(self._libc, name), None, 1, 0)  # _IOLBF

    def begin(self, node: NodeRef) -> None:
        """Mark the beginning of the test `node`.

        Write a heading to a log that is kept. Otherwise, empty the log, unless it is shown while the test runs.
        """
        if self._kept:
            self._end_line()
            name = "::".join((relpath(node.path, self._root), *node.names))
            self._write(f"{HEADING}{name}\n")
        elif not self._streams and stat(self._path).st_size:
            truncate(self._path, 0)

    def end_phase(self) -> None:
        """Flush the output of the phase to the log, and end its last line."""
        if self._libc is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        self._libc.fflush(None)
        if self._ends_lines:
            self._end_line()

    def _end_line(self) -> None:
        """End the last line of the log, if it is not empty and has no line end."""
        with _open(self._path, "rb") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    self._write("\n")

    def _write(self, text: str) -> None:
        with _open(self._path, "a", encoding="utf-8") as file:
            file.write(text)
