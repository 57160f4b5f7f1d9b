"""An estimate of the rest of a session, from the times of its tests in earlier sessions."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pytest_accel.schedule.forecast import SuiteOnMachine
from pytest_accel.schedule.lower_bounds import suite_lower_bound


class RemainingTime:
    """Estimates the rest of a session: as long as the tests take at least that have not ended."""

    def __init__(self, suite: SuiteOnMachine, workers: int) -> None:
        self._suite = suite
        self._workers = workers

    def seconds(self, ended: Collection[str], running: Mapping[str, float]) -> float | None:
        """Return the estimate; None if the times of more than half of the tests are unknown.

        `ended` are node ids of tests; `running` has the seconds that each running test has taken.
        """
        suite = self._suite
        if 2 * suite.times.unknown > len(suite.collection):
            return None
        left = [
            (request, max(0.0, seconds - running.get(test, 0.0)))
            for test, request, seconds in zip(suite.collection, suite.requests, suite.times.seconds, strict=True)
            if test not in ended
        ]
        return max(suite_lower_bound(left, suite.slots), sum(seconds for _, seconds in left) / self._workers)
