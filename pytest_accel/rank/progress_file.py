"""How far a rank has come in its test, readable when the rank cannot speak any more.

A rank that passes says so once, when the test has ended, because each message wakes the driver in the middle of the
test. What it has passed until then stands in a file.
"""

from __future__ import annotations

import mmap
import struct

_RECORD = struct.Struct("<IBd")


class Progress:
    """The rank's end."""

    def __init__(self, path: str) -> None:
        # Not a descriptor: a test may close them all, and have its own file under this one's number.
        with open(path, "w+b") as file:
            file.write(bytes(_RECORD.size))  # Where the disk is full, it is here that it shows, and not in a test.
            file.flush()
            self._page = mmap.mmap(file.fileno(), _RECORD.size)

    def note(self, serial: int, passed: int, at: float) -> None:
        """In test `serial`, `passed` phases have passed, the last at `at` (`clock.monotonic`)."""
        self._page[:] = _RECORD.pack(serial, passed, at)


def read(path: str) -> tuple[int, int, float]:
    """What was noted last: serial, phases passed, time; zeros where nothing was."""
    try:
        with open(path, "rb") as file:
            data = file.read(_RECORD.size)
    except OSError:
        return 0, 0, 0.0
    return _RECORD.unpack(data) if len(data) == _RECORD.size else (0, 0, 0.0)
