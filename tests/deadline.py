"""Timeouts of tests that wait for an event."""

from __future__ import annotations

import os
import time


def scaled(seconds: float) -> float:
    """Return a time limit that is `seconds` on a machine that is not busy, and grows with the load.

    A hung process is not told from a slow one by the clock alone: on two cores with a load of twenty, everything takes
    ten times as long.
    """
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Deadline:
    """A time limit that begins now, in seconds of a machine that is not busy: the load counts as it is at each look."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.monotonic()

    @property
    def expired(self) -> bool:
        """True if the time is up."""
        return time.monotonic() - self._began >= scaled(self._seconds)
