"""File with the progress of a rank in its test, which can be read if the rank hangs or dies.

A rank whose test passes sends one message, at the end of the test, because each message wakes the driver. Until then,
the file has the number of passed phases.
"""

from __future__ import annotations

import mmap
import struct

_RECORD = struct.Struct("<IBd")
"""Serial of the test, number of its passed phases, and time when the last one passed."""


class ProgressFile:
    """The progress file of a rank, for writing."""

    def __init__(self, path: str) -> None:
        # Mapped into memory, since a test may close all descriptors and open its own file with the same number.
        with open(path, "w+b") as file:
            file.write(bytes(_RECORD.size))  # Allocates the space: a full disk raises here and not during a test.
            file.flush()
            self._page = mmap.mmap(file.fileno(), _RECORD.size)

    def note(self, serial: int, passed: int, at: float) -> None:
        """Record that `passed` phases of test `serial` have passed.

        `at` is the time when the last one passed, by the driver's `clock.monotonic`.
        """
        self._page[:] = _RECORD.pack(serial, passed, at)


def read(path: str) -> tuple[int, int, float]:
    """Return the last record: serial, passed phases and time. Return zeros if there is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(_RECORD.size)
    except OSError:
        return 0, 0, 0.0
    return _RECORD.unpack(data) if len(data) == _RECORD.size else (0, 0, 0.0)
