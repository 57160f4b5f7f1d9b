"""Files with the output and log records that pytest captures in a rank. The driver reads them if the rank dies."""

from __future__ import annotations

import logging
from os import O_CLOEXEC, O_CREAT, O_RDWR, O_TRUNC, close, dup2, fstat, pread, write
from os import open as open_descriptor
from typing import Any

import pytest

from pytest_accel.core.paths import CAPTURED_FILES
from pytest_accel.core.shims import captured_log, captured_streams
from pytest_accel.rank.appended_file import AppendedFile


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
