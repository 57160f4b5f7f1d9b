"""The output of a rank, in files: what is written to its standard streams, what it logs, and what pytest shows.

Descriptors 1 and 2 refer to one file as long as the rank lives. pytest's capture reads it after each phase, the driver
reads it if the rank dies, ``-s`` shows it while it grows, and ``--accel-output`` keeps it. So no text is copied, no
text is lost if the rank dies, whichever code has written it, and no rank waits for a reader.
"""

from __future__ import annotations

import ctypes
import io
import logging
import sys
from contextlib import suppress
from os import (
    O_APPEND,
    O_CREAT,
    O_EXCL,
    O_RDONLY,
    O_RDWR,
    O_WRONLY,
    close,
    devnull,
    dup2,
    fstat,
    makedirs,
    stat,
    stat_result,
    symlink,
    truncate,
    unlink,
)
from os import open as open_descriptor
from os.path import dirname, relpath, samestat
from typing import Any

import pytest

from pytest_accel.compat.pytest_shims import capture_with, hide_names_of_tests, log_handler, set_terminal_file
from pytest_accel.core.node_refs import NodeRef
from pytest_accel.core.session_folder import HEADING, rank_path
from pytest_accel.core.truncation import line_prefix, read_end
from pytest_accel.rank.context import RankContext
from pytest_accel.rank.stack_file import StackFile

_open = open  # A test may replace it.
_NAMES = {1: "stdout", 2: "stderr"}
"""The standard streams of `sys` by their descriptors."""


class RankOutput:
    """Pytest plugin of a rank that owns the file of its output; it only looks at it if a test writes nothing."""

    def __init__(self, context: RankContext) -> None:
        """Make descriptors 1 and 2 write to the file of this rank, and 0 read from the null device.

        If the output is shown or kept, the file has the text of all tests, otherwise that of one phase.
        """
        self._session = session = context.session
        directory, world, rank = session.directory, context.spec.world, context.rank
        path = rank_path(directory, world, rank, "output")
        self._records = rank_path(directory, world, rank, "records")
        self._stacks = context.operations.stack_file = StackFile(rank_path(directory, world, rank, "stack"))
        self._shown = rank_path(directory, world, rank, session.shows) if session.shows is not None else None
        """The file to which pytest's terminal writer appends; None if the session shows nothing of it."""
        self._prefix = line_prefix(rank, context.spec.ranks)
        if session.logs is not None:
            with suppress(OSError):  # On another machine than the session's, the folder may be missing.
                _make_kept(f"{session.logs}/world-{world}-rank-{rank}.log", path)
        self._streams = _Streams(path, keeps=session.shows == "output" or session.logs is not None)
        self.redirect()
        # Neither Python nor C hold text back: it would be lost if the process died, and out of order.
        libc = ctypes.CDLL(None)
        stdout = ctypes.c_void_p.in_dll(libc, "__stdoutp" if sys.platform == "darwin" else "stdout")
        libc.setvbuf(stdout, None, 2, 0)  # _IONBF

    def redirect(self) -> None:
        """Make descriptor 0 read from the null device, and 1 and 2 write to the file unless they do."""
        null = open_descriptor(devnull, O_RDONLY)
        dup2(null, 0)
        close(null)
        self._streams.redirect()

    def begin(self, node: NodeRef) -> None:
        """Begin the output of the test `node`. Text that has been written before is not captured any more."""
        self._streams.snap()
        if self._streams.keeps:
            name = "::".join((relpath(node.path, self._session.invocation_dir), *node.names))
            _append(self._streams.path, f"{HEADING}{name}\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> None:
        """Let pytest capture from the file, before any code of the suite runs."""
        capture_with(early_config, self._streams)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Redirect pytest's logs, terminal, and stacks of crashes. The hooks of its own plugins are called before."""
        self._stacks.catch_crashes()
        if (handler := log_handler(config, "report_handler")) is not None:
            handler.addFilter(_is_not_from_torch)
            _copy(handler, self._records)
        if self._prefix and (handler := log_handler(config, "log_file_handler")) is not None:
            original = handler.format
            handler.format = lambda record: self._prefix + original(record).replace("\n", f"\n{self._prefix}")
        if config.pluginmanager.has_plugin("terminalreporter"):
            set_terminal_file(config, _Lines(self._shown))
            if getattr(config.option, "setupshow", False):
                hide_names_of_tests(config)


def _make_kept(path: str, link: str) -> None:
    """Create the empty file `path`, and its folder if it does not exist, and a symbolic `link` to it."""
    makedirs(dirname(path), exist_ok=True)
    with suppress(FileNotFoundError):
        unlink(path)
    close(open_descriptor(path, O_WRONLY | O_CREAT | O_EXCL, 0o600))
    symlink(path, link)


class _Streams:
    """The standard streams of the rank, which write to one file; takes the place of pytest's `FDCapture`."""

    def __init__(self, path: str, *, keeps: bool) -> None:
        """Make descriptors 1 and 2 and the streams of `sys` write to `path`, which `keeps` what has been captured."""
        self.path = path
        self.keeps = keeps
        self._read = 0
        """Bytes at the beginning of the file that have been captured, or were written before the test."""
        self._identity: stat_result | None = None
        self.redirect()
        self._streams = {
            name: io.TextIOWrapper(_Unclosed(number, name), "utf-8", "replace", newline="", write_through=True)
            for number, name in _NAMES.items()
        }
        vars(sys).update({f"__{name}__": stream for name, stream in self._streams.items()}, **self._streams)

    def redirect(self) -> None:
        """Make descriptors 1 and 2 write to the file unless they do."""
        if all(map(self._writes_here, _NAMES)):
            return
        file = open_descriptor(self.path, O_RDWR | O_CREAT | O_APPEND, 0o600)
        self._identity = fstat(file)
        for number in _NAMES:
            dup2(file, number)
        close(file)

    def _writes_here(self, number: int) -> bool:
        """Return False if a test has closed or replaced the descriptor `number`, or a debugger uses it."""
        try:
            return self._identity is not None and samestat(fstat(number), self._identity)
        except OSError:
            return False

    def start(self) -> None:
        """Undo what the test has done to the streams and their descriptors."""
        vars(sys).update(self._streams)
        self.redirect()

    resume = start

    def suspend(self) -> None:
        """Do nothing: the streams go on writing to the file."""

    done = suspend

    def snap(self) -> str:
        """Return the text since the last call, and remove it from the file unless that keeps it."""
        file = next(filter(self._writes_here, _NAMES), self.path)
        size = stat(file).st_size
        if size <= self._read:
            return ""
        text = read_end(file, self._read)
        if self.keeps:
            self._read = size
        else:
            truncate(file, 0)
        return text

    def writeorg(self, data: str) -> None:
        """Do nothing: the text is in the file already."""


class _Unclosed(io.FileIO):
    """A standard stream's binary file that stays open if a test closes the stream, which serves all tests."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, "wb", closefd=False)
        self.name = f"<{name}>"

    def close(self) -> None:
        """Do nothing."""


def _append(path: str, text: str) -> None:
    """Append `text` to the file `path`, which is not kept open: a test may close every descriptor.

    Ignore errors such as a full disk: no test fails for want of this file.
    """
    with suppress(OSError), _open(path, "ab", buffering=0) as file:
        file.write(text.encode(errors="replace"))


class _Lines(io.TextIOBase):
    """The file of pytest's terminal writer in a rank. It passes on lines that are not empty; a flush ends a line."""

    def __init__(self, path: str | None) -> None:
        """Append lines to the file `path`; show none if it is None."""
        self._path = path
        self._line = ""

    def write(self, text: str) -> int:
        self._line += text
        if text.endswith("\n"):
            self.flush()
        return len(text)

    def flush(self) -> None:
        line, self._line = self._line.strip("\n"), ""
        if line and self._path is not None:
            _append(self._path, f"{line}\n")


def _is_not_from_torch(record: logging.LogRecord) -> bool:
    """Return False for the records of failed calls of `torch.distributed`, which only repeat the exception."""
    return record.module != "c10d_logger"


def _copy(handler: Any, path: str) -> None:
    """Write what the `handler` of the captured log formats to the file `path` as well, which has the log of a phase."""
    emit, reset = handler.emit, handler.reset

    def emit_both(record: logging.LogRecord) -> None:
        emit(record)
        _append(path, f"{handler.format(record)}\n")

    def reset_both() -> None:
        reset()
        with suppress(OSError):  # No text has been logged.
            truncate(path, 0)

    handler.emit, handler.reset = emit_both, reset_both
