"""Passes on what the ranks of a world log (`rank.output_files`) in the driver while a test runs."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from pytest_accel.core.paths import END_OF_CALL, UNFINISHED
from pytest_accel.core.shims import live_log_handler, log_file_handler
from pytest_accel.core.terminal_lines import write_text
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.diagnostics.inspector import GrowingFile, LogReader, WorldInspector
from pytest_accel.driver.log_tail import BACKLOG, CHUNK, Tail
from pytest_accel.settings.options import is_distributed

_LONGEST_FILE = 1 << 20
"""Bytes above which a file is emptied after a test. A record that arrives at that moment is lost."""
_END_OF_CALL = END_OF_CALL.encode()


def shows_logs_of_ranks(config: pytest.Config) -> bool:
    """Return whether this process shows live logs or fixtures of ranks (``log_cli``, ``--setup-show``).

    A worker of xdist has no terminal. With ``-s``, they are a part of the output of ranks, which is shown.
    """
    option = config.option
    if is_distributed(config) or getattr(option, "capture", "no") == "no":
        return False
    if not config.pluginmanager.has_plugin("terminalreporter"):
        return False
    return live_log_handler(config) is not None or bool(getattr(option, "setupshow", False))


class _RelayedFile:
    """A file to which the ranks of a world on one machine append whole records, and which is passed on unchanged."""

    def __init__(self, file: LogReader, write: Callable[[str], None], *, terminal: bool) -> None:
        self._file = file
        self._write = write
        self._terminal = terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0
        self._after_call = False
        """True if a rank has ended the call of the test, and all it wrote before has been passed on."""

    def show(self, *, before_end: bool = False) -> bool:
        """Pass on the next chunk; return whether there is more.

        Text after the end of a rank's call is left for the next time; with `before_end` also from then on.
        """
        if self._terminal:
            self._skip()
        data = self._file.read(self._offset, CHUNK)
        is_full = len(data) == CHUNK
        if is_full:  # Pass on whole lines: the driver may write to the same place.
            data = data[: data.rfind(b"\n") + 1] or data
        length = data.rfind(_END_OF_CALL) + 1 if self._terminal else 0
        if length:
            self._after_call = True
            data = data[:length]
        elif before_end and self._after_call:
            return False
        self._offset += len(data)
        if text := self._decoder.decode(data):
            self._write(text)
        return is_full

    def _skip(self) -> None:
        """Skip to the last chunk if the backlog is too long, and write a note on the bytes left out."""
        left_out = self._file.size() - self._offset - CHUNK
        if left_out > BACKLOG - CHUNK:
            self._offset += left_out
            self._write(f"[… {left_out} bytes left out …]\n")

    def drain(self) -> None:
        """Pass on what the ranks have written in the setup or the call, which have ended."""
        end = self._file.size()
        while self.show(before_end=True) and self._offset < end:
            pass

    def finish(self, longest: int) -> None:
        """Pass on all text of a test that has ended; then empty the file if it is longer than `longest` bytes."""
        end = self._file.size()
        while self._offset < end:
            before = self._offset
            self.show()
            if self._offset == before:  # A test has removed or truncated the file.
                break
        self._after_call = False
        if self._offset > longest:
            self._file.truncate()
            self._offset = 0


class RelayedLogs(Tail):
    """Passes on what the ranks of a world have written for the session's log file, or for its terminal."""

    def __init__(
        self,
        inspector: WorldInspector,
        spec: WorldSpec,
        name: GrowingFile,
        write: Callable[[str], None],
        *,
        terminal: bool,
    ) -> None:
        """Pass the text of the files `name` to `write`. For the `terminal`, text is left out if the backlog is long."""
        machines = {
            spec.server_of(rank) if spec.is_remote(rank) else None: rank for rank in reversed(range(spec.ranks))
        }
        self._files = [
            _RelayedFile(LogReader(inspector, rank, name), write, terminal=terminal) for rank in machines.values()
        ]

    def show(self) -> bool:
        shown = [file.show() for file in self._files]
        return any(shown)

    def drain(self) -> None:
        for file in self._files:
            file.drain()

    def finish(self) -> None:
        for file in self._files:
            file.finish(_LONGEST_FILE)

    def close(self) -> None:
        """Pass on all text, and empty the files: the next driver of the world reads them from the start."""
        for file in self._files:
            file.finish(0)


def relayed_logs(inspector: WorldInspector, spec: WorldSpec, config: pytest.Config) -> Iterator[RelayedLogs]:
    """Yield the objects that pass on the logs of a world's ranks to the places that this process has for them."""
    if (handler := log_file_handler(config)) is not None:
        yield RelayedLogs(inspector, spec, "log_file", partial(_log, handler), terminal=False)
    if shows_logs_of_ranks(config):
        yield RelayedLogs(inspector, spec, "terminal", partial(_show, config), terminal=True)


def _log(handler: Any, text: str) -> None:
    """Write `text`, formatted records of ranks, to the file of pytest's `handler`."""
    handler.acquire()
    try:
        with suppress(OSError, ValueError):  # As in pytest, no test fails because of the log file.
            if handler.stream is not None:  # pytest has not closed it.
                handler.stream.write(text)
                handler.flush()
    finally:
        handler.release()


def _show(config: pytest.Config, text: str) -> None:
    for part in filter(None, text.replace(END_OF_CALL, "").split(UNFINISHED)):
        write_text(config, part)
