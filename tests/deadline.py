"""Timeouts of tests that wait for an event."""

from __future__ import annotations

import os
import time


def scaled(seconds: float) -> float:
    """Return a timeout that is `seconds` on an idle machine and grows with the load.

    With a fixed timeout, a slow process would count as hung: on two cores with a load of twenty, everything takes ten
    times as long.
    """
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Deadline:
    """A timeout that starts now and is scaled by the load of the machine whenever it is checked."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is the timeout on an idle machine."""
        self._seconds = seconds
        self._start = time.monotonic()

    @property
    def expired(self) -> bool:
        """True if the timeout has passed."""
        return time.monotonic() - self._start >= scaled(self._seconds)
