"""What a rank logs and sets up, written to files whose text the driver passes on while the test runs.

The ranks of a world on one machine append to the same files, one for the session's log file and one for its terminal.
So the text of all ranks is in order of time, no rank waits for the driver, and what a rank has logged before it dies is
not lost.
"""

from __future__ import annotations

import logging
from io import TextIOBase
from typing import Any

import pytest

from pytest_accel.core.paths import END_OF_CALL, UNFINISHED, log_file_path, terminal_path
from pytest_accel.core.rank_names import line_prefix
from pytest_accel.core.shims import live_log_handler, show_fixtures_with, terminal_file, write_log_file_to
from pytest_accel.rank.appended_file import AppendedFile
from pytest_accel.rank.context import RankContext


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
