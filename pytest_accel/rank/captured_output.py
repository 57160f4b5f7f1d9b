"""Files that hold what pytest has captured in a rank, and outlive the rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from json import dumps, load
from os import O_CLOEXEC, O_CREAT, O_RDWR, O_TRUNC, close, dup2, fstat, pread, truncate, write
from os import open as open_descriptor
from typing import Any

import pytest

from pytest_accel.core.messages import When
from pytest_accel.core.paths import captured_log_path, captured_path, stderr_path, stdout_path
from pytest_accel.core.shims import captured_log, captured_streams
from pytest_accel.core.truncation import read_cut

_open = open  # A test may replace it.

Section = tuple[str, str]
"""Headline and text, as in a report of pytest's."""

_RUNNING = {"stdout": stdout_path, "stderr": stderr_path, "log": captured_log_path}
"""pytest's names of what it captures in a phase, in the order in which it shows them."""


class Captured:
    """The files of one rank, as the rank writes them. A test that prints and logs nothing costs nothing."""

    def __init__(self, directory: str, world: int, rank: int) -> None:
        self._paths = {name: path(directory, world, rank) for name, path in _RUNNING.items()}
        self._log = _Copy(self._paths["log"])
        self._passed = _Copy(captured_path(directory, world, rank))

    def open(self, config: pytest.Config) -> None:
        """Have pytest capture into the files, at a time when its capture is suspended."""
        for name, stream in captured_streams(config).items():
            if hasattr(stream, "getvalue"):
                _copy(stream, _Copy(self._paths[name]))
            else:
                _give_name(stream.fileno(), self._paths[name])
        if (handler := captured_log(config)) is not None:
            handler.setFormatter(_CopyingFormatter(handler.formatter or logging.Formatter(), self._log))

    def begin(self) -> None:
        """Empty the file of the test before."""
        self._passed.clear()

    def end_phase(self) -> None:
        """Empty the file of log records; pytest empties the others."""
        self._log.clear()

    def keep(self, sections: Sequence[Section]) -> None:
        """Write down the `sections` of the phases that have passed, which are reported when the test has ended."""
        if sections:
            self._passed.clear()
            self._passed.add(dumps(sections))


def read(directory: str, world: int, rank: int, when: When) -> list[Section]:
    """Return the sections of a rank that has ended in phase `when`."""
    found: list[Section] = []
    with suppress(OSError, ValueError), open(captured_path(directory, world, rank), "rb") as file:
        found += [(str(name), str(text)) for name, text in load(file)]
    for name, path in _RUNNING.items():
        with suppress(OSError):
            if text := read_cut(path(directory, world, rank)):
                found.append((f"Captured {name} {when}", text))
    return found


class _Copy:
    """A file for text that is held in memory too. It is not kept open: a test may close every descriptor."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._filled = False

    def add(self, text: str) -> None:
        """Append `text`. A full disk is no failure of the test: the copy is read only if the rank ends."""
        self._filled = True
        with suppress(OSError), _open(self._path, "ab") as file:
            file.write(text.encode(errors="replace"))

    def clear(self) -> None:
        """Empty the file."""
        if self._filled:
            self._filled = False
            with suppress(OSError):
                truncate(self._path, 0)


def _copy(stream: Any, copy: _Copy) -> None:
    """Have `copy` hold what `stream` holds: pytest reads it and truncates it when a phase ends."""
    write_one, truncate_one = stream.write, stream.truncate

    def write_both(text: str) -> int:
        copy.add(text)
        return int(write_one(text))

    def truncate_both(size: int | None = None) -> int:
        copy.clear()
        return int(truncate_one(size))

    copy.add(stream.getvalue())
    stream.write, stream.truncate = write_both, truncate_both


def _give_name(descriptor: int, path: str) -> None:
    """Have `descriptor` be that of a file `path` of the same content."""
    named = open_descriptor(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0o600)
    write(named, pread(descriptor, fstat(descriptor).st_size, 0))
    dup2(named, descriptor, inheritable=False)
    close(named)


class _CopyingFormatter(logging.Formatter):
    """Formats as another formatter does, and copies each line."""

    def __init__(self, original: logging.Formatter, copy: _Copy) -> None:
        super().__init__()
        self._original = original
        self._copy = copy

    def format(self, record: logging.LogRecord) -> str:
        text = self._original.format(record)
        self._copy.add(f"{text}\n")
        return text
