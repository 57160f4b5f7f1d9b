"""The clocks, which tests cannot stop or set, and the pauses of this process that deadlines leave out.

A test may change the time in a rank: freezegun replaces ``time.monotonic`` in every module that has imported it, and
time-machine replaces it in the ``time`` module itself. Neither replaces ``time.clock_gettime`` for the monotonic clock
of the kernel, which this module reads.
"""

from __future__ import annotations

import time
from functools import partial
from threading import Lock

monotonic = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
"""Return seconds since an arbitrary start, which is the same for all processes of a machine."""
wall_clock = partial(time.clock_gettime, time.CLOCK_REALTIME)
"""Return seconds since the epoch."""

_SHORTEST_PAUSE = 1.0
"""Seconds; a process on a busy machine wakes up late, too, but less."""


class Pauses:
    """The times in which this process could not run, since it was stopped or its container was frozen. Thread-safe.

    The kernel's clock goes on meanwhile, so a timeout would be over although no process had the time. A loop that waits
    for something wakes up about once a second, and notices here that it has woken up late. One that sleeps longer would
    not notice a pause that ends before it wants to wake up.
    """

    LONGEST_SLEEP = 1.0
    """Seconds that a loop may sleep before it calls :meth:`notice`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pauses: list[tuple[float, float]] = []
        """Start and end of each pause, in order; they do not overlap."""

    def notice(self, due: float) -> None:
        """Record a pause if this process, which wanted to run at the time `due`, runs only now."""
        now = monotonic()
        if now - due > _SHORTEST_PAUSE:
            with self._lock:
                start = max(due, self._pauses[-1][1]) if self._pauses else due  # Another thread may have noticed it.
                if start < now:
                    self._pauses.append((start, now))

    def since(self, moment: float) -> float:
        """Return the seconds of all pauses after the time `moment`."""
        return sum(end - max(start, moment) for start, end in self._pauses.copy() if end > moment)


PAUSES = Pauses()
"""The pauses of this process."""
