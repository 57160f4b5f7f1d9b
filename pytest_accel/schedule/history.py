"""Times of tests in earlier sessions, stored in pytest's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

KEY = "accel/durations"
"""Key in pytest's cache; the value has lists of seconds by node id and kind of device, the latest last."""
_KEPT = 5
"""Number of times that are stored for each test and kind of device."""
_DECAY = 0.8
"""Weight of a session's time relative to that of the session after it."""
_TESTS = 100_000
"""Number of tests that are stored: those that ran last."""

Durations = dict[str, dict[str, list[float]]]


def expected(values: Sequence[float]) -> float | None:
    """Return the weighted median of a test's times, the latest with most weight; None if there are no times."""
    weighted = sorted((value, _DECAY**age) for age, value in enumerate(reversed(values)))
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in weighted:
        half -= weight
        if half <= 0:
            return value
    return None


def recall(config: pytest.Config) -> Durations:
    """Return the stored times; empty if pytest has no cache, or the stored value is invalid."""
    cache = getattr(config, "cache", None)
    found = cache.get(KEY, None) if cache is not None else None
    return found if isinstance(found, dict) else {}


def expected_times(durations: Durations, tests: Sequence[tuple[str, str]]) -> list[float | None]:
    """Return the expected seconds of each of `tests`, a node id and a kind of device; None if no time is stored."""
    return [expected(durations.get(nodeid, {}).get(kind, ())) for nodeid, kind in tests]


def remember(durations: Durations, times: Mapping[str, float], kinds: Mapping[str, str]) -> Durations:
    """Return `durations` with the `times` of one more session added; `kinds` has the kind of device by node id."""
    kept = dict(durations)
    for nodeid, seconds in times.items():
        kind = kinds[nodeid]
        earlier = kept.pop(nodeid, {})
        kept[nodeid] = earlier | {kind: [*earlier.get(kind, ()), round(seconds, 4)][-_KEPT:]}
    return dict(list(kept.items())[-_TESTS:])


class Recorder:
    """A pytest plugin that stores the times of the tests that passed, summed over their phases, after a session."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        """`kinds` has the kind of device by node id; tests that are not in it are not stored."""
        self._kinds = kinds
        self._seconds: dict[str, float] = {}
        self._passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._seconds[report.nodeid], self._passed[report.nodeid] = 0.0, True
        if report.nodeid in self._seconds:
            self._seconds[report.nodeid] += report.duration
            self._passed[report.nodeid] &= report.passed

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        cache: Any = getattr(session.config, "cache", None)
        times = {
            nodeid: seconds
            for nodeid, seconds in self._seconds.items()
            if self._passed[nodeid] and nodeid in self._kinds
        }
        if cache is not None and times:
            cache.set(KEY, remember(recall(session.config), times, self._kinds))
