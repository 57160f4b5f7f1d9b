"""Output that pytest captures, logs and shows in a rank, written to files that the driver reads.

The files of captured text are those of one rank, and are read if it dies. The ranks of a world on one machine append
what they log, and what they show, to the same two files, whose text the driver passes on while the test runs. So the
text of all ranks is in order of time, no rank waits for the driver, and what a rank has written before it dies is not
lost.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from io import TextIOBase
from os import O_CLOEXEC, O_CREAT, O_RDWR, O_TRUNC, close, dup2, fstat, pread, truncate, write
from os import open as open_descriptor
from typing import Any

import pytest

from pytest_accel.core.paths import CAPTURED_FILES, END_OF_CALL, UNFINISHED, log_file_path, terminal_path
from pytest_accel.core.rank_names import line_prefix
from pytest_accel.core.shims import (
    captured_log,
    captured_streams,
    live_log_handler,
    show_fixtures_with,
    terminal_file,
    write_log_file_to,
)
from pytest_accel.rank.context import RankContext

_open = open  # A test may replace it.


class AppendedFile:
    """A file to which this process appends, and other processes may append, too.

    It is not kept open: a test may close every descriptor.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._filled = False

    def write(self, text: str) -> int:
        """Append `text` at once. Ignore errors such as a full disk: no test fails for want of this file."""
        self._filled = True
        with suppress(OSError), _open(self._path, "ab", buffering=0) as file:
            file.write(text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: the text is in the file."""

    def clear(self) -> None:
        """Empty the file if this process has written to it."""
        if self._filled:
            self._filled = False
            with suppress(OSError):
                truncate(self._path, 0)


class CapturedOutput:
    """The files of this rank, for writing. A test that prints and logs nothing causes no access to a file."""

    def __init__(self, directory: str, world: int, rank: int) -> None:
        self._paths = {name: path(directory, world, rank) for name, path in CAPTURED_FILES.items()}
        self._log = AppendedFile(self._paths["log"])

    def open(self, config: pytest.Config) -> None:
        """Make pytest capture into the files. Call this while pytest's capture is suspended."""
        for name, stream in captured_streams(config).items():
            if hasattr(stream, "getvalue"):
                _copy(stream, AppendedFile(self._paths[name]))
            else:
                _replace_with_named_file(stream.fileno(), self._paths[name])
        if (handler := captured_log(config)) is not None:
            handler.addFilter(_is_not_from_torch)
            handler.setFormatter(_CopyingFormatter(handler.formatter or logging.Formatter(), self._log))

    def end_phase(self) -> None:
        """Empty the file of log records. pytest truncates the other files itself."""
        self._log.clear()


def _is_not_from_torch(record: logging.LogRecord) -> bool:
    """Return False for the records of failed calls of `torch.distributed`, which only repeat the exception."""
    return record.module != "c10d_logger"


def _copy(stream: Any, copy: AppendedFile) -> None:
    """Mirror the in-memory `stream` in `copy`. pytest reads and truncates the stream at the end of a phase."""
    write_one, truncate_one = stream.write, stream.truncate

    def write_both(text: str) -> int:
        copy.write(text)
        return int(write_one(text))

    def truncate_both(size: int | None = None) -> int:
        copy.clear()
        return int(truncate_one(size))

    copy.write(stream.getvalue())
    stream.write, stream.truncate = write_both, truncate_both


def _replace_with_named_file(descriptor: int, path: str) -> None:
    """Make `descriptor` refer to a new file `path` with the same content."""
    named = open_descriptor(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0o600)
    write(named, pread(descriptor, fstat(descriptor).st_size, 0))
    dup2(named, descriptor, inheritable=False)
    close(named)


class _CopyingFormatter(logging.Formatter):
    """Formatter that delegates to another one, and appends each formatted record to a copy."""

    def __init__(self, original: logging.Formatter, copy: AppendedFile) -> None:
        super().__init__()
        self._original = original
        self._copy = copy

    def format(self, record: logging.LogRecord) -> str:
        text = self._original.format(record)
        self._copy.write(f"{text}\n")
        return text


class LogRelay:
    """Pytest plugin of a rank that redirects pytest's log file, live logs and lines on fixtures.

    Each of them is redirected only if the session has it.
    """

    def __init__(self, context: RankContext) -> None:
        session, spec = context.session, context.spec
        self._session = session
        self._prefix = line_prefix(context.rank, spec.ranks)
        self._log_file = AppendedFile(log_file_path(session.directory, spec.world, context.rank))
        self._terminal = AppendedFile(terminal_path(session.directory, spec.world, context.rank))

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Redirect the text. pytest makes its handlers in its own implementation of this hook, which is called before.

        With ``-s``, live logs are part of the rank's output, where pytest writes them. So are the lines on fixtures:
        then they are in order with what the test prints.
        """
        if self._session.log_file and (handler := write_log_file_to(config, self._log_file)) is not None:
            handler.setFormatter(_PrefixFormatter(handler.formatter, self._prefix))
        if not config.pluginmanager.has_plugin("terminalreporter"):
            return
        output, _ = terminal_file(config)
        if self._session.shows_logs and (handler := live_log_handler(config)) is not None:
            lines = _LiveLines(self._terminal, self._prefix, output if self._session.logs is not None else None)
            handler.setStream(pytest.TerminalReporter(config, lines))  # type: ignore[arg-type]
        if not getattr(config.option, "setupshow", False):
            return
        if self._session.streams:
            show_fixtures_with(config, lambda text: output.write(text.removeprefix("\n") + "\n"))
        else:
            show_fixtures_with(config, lambda text: self._terminal.write(text + UNFINISHED))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Mark the end of the call, before the driver gets the report: what follows is text of the teardown."""
        if report.when == "call" and self._session.shows_logs:
            self._terminal.write(END_OF_CALL)


class _LiveLines(TextIOBase):
    """A text file for the terminal reporter of live logs. It passes on whole lines, each with a prefix."""

    def __init__(self, terminal: AppendedFile, prefix: str, output: Any) -> None:
        """`output` gets the same text without the prefix, if it is not None."""
        self._terminal = terminal
        self._prefix = prefix
        self._output = output
        self._unfinished = ""

    def write(self, text: str) -> int:
        if self._output is not None:
            self._output.write(text)
        if text == "\n" and not self._unfinished:
            return 1  # pytest ends the line with the test's name, which is the driver's.
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        if lines:
            self._terminal.write("".join(f"{self._prefix}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        if self._output is not None:
            self._output.flush()


class _PrefixFormatter(logging.Formatter):
    """Formatter that delegates to another one, and puts a prefix before each line."""

    def __init__(self, original: logging.Formatter | None, prefix: str) -> None:
        super().__init__()
        self._original = original or logging.Formatter()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        return self._prefix + self._original.format(record).replace("\n", f"\n{self._prefix}")
