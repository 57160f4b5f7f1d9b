"""Watches the ranks of a running test for a deadlock."""

from __future__ import annotations

from pytest_accel.core.clock import monotonic
from pytest_accel.core.flight_record import Wait
from pytest_accel.driver.rank_monitor import RankMonitor

_QUIET = 1.0
"""Seconds without a message of a rank before the first look, and between two looks that must agree."""
_INTERVAL = 2.0
"""Seconds between two looks that have found nothing. A deadlock is found within 4 seconds."""
_LONGEST_INTERVAL = 30.0
"""The same if a rank has not answered: the interval doubles each time, because the look has taken seconds."""


class DeadlockWatch:
    """Looks now and then whether the ranks of a test are in a deadlock. Owned by the driver's `World`."""

    def __init__(self, monitor: RankMonitor) -> None:
        self._monitor = monitor
        self.begin()

    def begin(self) -> None:
        """Begin anew with a test that begins."""
        self._interval = _INTERVAL
        self.postpone()

    def postpone(self) -> None:
        """Forget the last look, since a rank has sent a message."""
        self._seen: dict[int, Wait] = {}
        self._next = monotonic() + max(_QUIET, self._interval - _INTERVAL)

    def finds(self, deadline: float) -> bool:
        """Return True if two looks have found the same deadlock; `deadline` is the end of the test's own timeout."""
        now = monotonic()
        if now < self._next:
            return False
        found = self._monitor.deadlocked(deadline - now)
        if found is None:
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
        before, self._seen = self._seen, found or {}
        self._next = monotonic() + (_QUIET if found else self._interval)
        return bool(found) and found == before
