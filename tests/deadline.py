"""Timeouts of tests that wait for an event."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

TIMEOUT = 60.0
"""Default time limit of every wait, in seconds of a machine that is not busy (`Deadline`)."""

Value = TypeVar("Value")


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


def eventually(what: str, look: Callable[[], Value], timeout: float = TIMEOUT) -> Value:
    """Call `look` until its result is true and return this result; fail the test after `timeout` seconds."""
    deadline = Deadline(timeout)
    while not (found := look()):
        assert not deadline.expired, f"waited {timeout:g} s for {what} (longer on a busy machine)"
        time.sleep(0.02)
    return found
