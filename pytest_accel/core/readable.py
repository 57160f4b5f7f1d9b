"""A wait for data that reads no clock, since a test may have stopped the clock that `multiprocessing` reads."""

from __future__ import annotations

from math import ceil
from select import POLLIN, poll


def is_readable(descriptor: int, timeout: float = 0.0) -> bool:
    """Return whether `descriptor` has data or has ended; wait for that at most `timeout` seconds."""
    waiting = poll()
    waiting.register(descriptor, POLLIN)
    return bool(waiting.poll(ceil(timeout * 1000)))
