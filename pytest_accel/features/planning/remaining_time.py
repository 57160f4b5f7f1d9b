"""An estimate of the rest of a session, from the times of its tests in earlier sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pytest_accel.features.planning.forecast import SuiteOnMachine
from pytest_accel.features.planning.lower_bounds import suite_lower_bound


class RemainingTime:
    """Estimates the rest of a session: as long as the tests take at least that have not ended."""

    def __init__(self, suite: SuiteOnMachine, workers: int) -> None:
        self._suite = suite
        self._workers = workers

    def seconds(self, ended: Mapping[str, int], running: Iterable[tuple[str, float]]) -> float | None:
        """Return the estimate; None if the times of more than half of the tests are unknown.

        `ended` has the number of tests with a node id that have ended, and `running` the node id of each running test,
        with the seconds that it has taken.
        """
        suite = self._suite
        if 2 * suite.times.unknown > len(suite.collection):
            return None
        ends = Counter(ended)
        taken: dict[str, list[float]] = {}
        for test, seconds in running:
            taken.setdefault(test, []).append(seconds)
        left = []
        for test, request, seconds in zip(suite.collection, suite.requests, suite.times.seconds, strict=True):
            if ends[test]:
                ends[test] -= 1
            else:
                left.append((request, max(0.0, seconds - (taken[test].pop() if taken.get(test) else 0.0))))
        return max(suite_lower_bound(left, suite.slots), sum(seconds for _, seconds in left) / self._workers)
