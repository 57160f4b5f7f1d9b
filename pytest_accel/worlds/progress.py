"""How far a rank has come in its test, readable when the rank cannot speak any more.

A rank that passes says so once, when the test has ended, because each message wakes the driver in the middle of the
test. What it has passed until then stands in a file.
"""

from __future__ import annotations

import os
import struct

_RECORD = struct.Struct("<IBd")


class Progress:
    """The rank's end."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def note(self, serial: int, passed: int, at: float) -> None:
        """In test `serial`, `passed` phases have passed, the last at `at` (`time.monotonic`)."""
        os.pwrite(self._file, _RECORD.pack(serial, passed, at), 0)


def read(path: str) -> tuple[int, int, float]:
    """What was noted last: serial, phases passed, time; zeros where nothing was."""
    try:
        with open(path, "rb") as file:
            data = file.read(_RECORD.size)
    except OSError:
        return 0, 0, 0.0
    return _RECORD.unpack(data) if len(data) == _RECORD.size else (0, 0, 0.0)
