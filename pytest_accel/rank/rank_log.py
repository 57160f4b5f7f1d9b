"""A rank's log, to which file descriptors 1 and 2 write. The user may keep it (``--accel-output``)."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import sys
from contextlib import suppress
from os import stat, truncate
from os.path import relpath
from typing import Any

from pytest_accel.core.node_refs import NodeRef
from pytest_accel.core.paths import HEADING, kept_log_path, log_path
from pytest_accel.core.rank_messages import WarningSketch
from pytest_accel.core.session_spec import SessionSpec

_open = open  # A test may replace it.
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
_problems: list[str] = []
"""Why the log of this rank, which the user wants to keep, is incomplete."""


class _LogStream(io.FileIO):
    """The log as the file of a standard stream. A test that writes to a log on a full disk does not fail because of it.

    pytest writes what it captures to the log, too (``--capture=tee-sys``), and the captured text is complete.
    """

    def __init__(self, descriptor: int, kept: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._kept = kept

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _DISK_IS_FULL:
                raise
            _add_problem(self._kept, error)
            return memoryview(data).nbytes


def _add_problem(kept: str, error: OSError) -> None:
    if not _problems:
        _problems.append(f"the log {kept} of --accel-output is incomplete: {error.strerror}")


def redirect(session: SessionSpec, world: int, rank: int) -> None:
    """Make file descriptors 1 and 2 write to the rank's log, and 0 read from the null device."""
    path = log_path(session.directory, world, rank)
    if session.logs is not None:
        kept = kept_log_path(session.logs, world, rank)
        try:
            _make_kept_log(session.logs, kept)
            os.symlink(kept, path)
        except OSError as error:
            _add_problem(kept, error)
        sys.stdout = sys.__stdout__ = _stream(sys.stdout, 1, kept)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _stream(sys.stderr, 2, kept)  # type: ignore[misc]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)


def _make_kept_log(folder: str, kept: str) -> None:
    """Create the empty file `kept` in `folder`, which is created if it does not exist."""
    os.makedirs(folder, exist_ok=True)
    with suppress(FileNotFoundError):
        os.unlink(kept)
    os.close(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def _stream(like: Any, descriptor: int, kept: str) -> io.TextIOWrapper:
    """Return a text stream with the encoding of `like` that writes to `descriptor`, the log `kept`."""
    log = io.BufferedWriter(_LogStream(descriptor, kept))
    return io.TextIOWrapper(log, like.encoding, like.errors, line_buffering=True)


class RankLog:
    """The log of this rank: writes headings and missing line ends to it, flushes it, and empties it between tests."""

    def __init__(self, session: SessionSpec, world: int, rank: int, ranks: int) -> None:
        self._path = log_path(session.directory, world, rank)
        self._kept_path = kept_log_path(session.logs or "", world, rank)
        self._kept = session.logs is not None
        self._problem_reported = False
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

    def take_warnings(self) -> list[WarningSketch]:
        """Return a warning if the log is incomplete; none in later calls."""
        if self._problem_reported or not _problems:
            return []
        self._problem_reported = True
        return [WarningSketch(f"accel: {_problems[0]}", "builtins", "RuntimeWarning", __file__, 0, None)]

    def _end_line(self) -> None:
        """End the last line of the log, if it is not empty and has no line end."""
        with _open(self._path, "rb") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    self._write("\n")

    def _write(self, text: str) -> None:
        try:
            with _open(self._path, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            if error.errno not in _DISK_IS_FULL:
                raise
            _add_problem(self._kept_path, error)
