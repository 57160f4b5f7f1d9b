"""File with the progress of a rank in its test, which can be read while the rank is busy, or if it dies.

A rank whose test passes sends one message, at the end of the test, because each message wakes the driver. Until then,
the file has the number and the times of the passed phases.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any, NamedTuple

_RECORD = struct.Struct("<IBd4d")
"""Serial of the test, number and last time of its passed phases, and start and duration of setup and call."""


class Progress(NamedTuple):
    """The phases of a test that a rank has passed."""

    serial: int = 0
    """Serial of the test; 0 before the first one."""
    at: float = 0.0
    """Time when the last of the phases passed, by the driver's `clock.monotonic`."""
    passed: tuple[dict[str, Any], ...] = ()
    """The reports of these phases, in order, as far as the file has them; the fields are those of pytest's reports."""


class ProgressFile:
    """The progress file of a rank, for writing."""

    def __init__(self, path: str) -> None:
        # Mapped into memory, since a test may close all descriptors and open its own file with the same number.
        with open(path, "w+b") as file:
            file.write(bytes(_RECORD.size))  # Allocates the space: a full disk raises here and not during a test.
            file.flush()
            self._page = mmap.mmap(file.fileno(), _RECORD.size)
        self._setup = (0.0, 0.0)
        """Start and duration of the setup that passed last."""

    def note_setup(self, serial: int, at: float, start: float, duration: float) -> None:
        """Record that the setup of test `serial` has passed at time `at`; see `Progress`.

        `start` (`time.time`) and `duration` are those of pytest's report, in seconds.
        """
        self._setup = start, duration
        self._page[:] = _RECORD.pack(serial, 1, at, *self._setup, 0.0, 0.0)

    def note_call(self, serial: int, at: float, start: float, duration: float) -> None:
        """Record that the call of test `serial` has passed, as :meth:`note_setup` does for its setup."""
        self._page[:] = _RECORD.pack(serial, 2, at, *self._setup, start, duration)


def read(path: str) -> Progress:
    """Return the last record; a record of no phase if there is none."""
    try:
        with open(path, "rb") as file:
            serial, passed, at, *times = _RECORD.unpack(file.read(_RECORD.size))
    except (OSError, struct.error):
        return Progress()
    starts = zip(times[::2], times[1::2], strict=True)
    reports = [{"outcome": "passed", "start": start, "stop": start + took, "duration": took} for start, took in starts]
    return Progress(serial, at, tuple(reports[:passed]))
