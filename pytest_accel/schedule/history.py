"""How long tests took in earlier sessions, in pytest's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

KEY = "accel/durations"
"""Where pytest's cache has it: seconds by node id and kind of device, the latest last."""
_KEPT = 5
_DECAY = 0.8
_TESTS = 100_000
"""The tests that are remembered: those that ran last."""

Durations = dict[str, dict[str, list[float]]]


def expected(values: Sequence[float]) -> float | None:
    """The median of what a test took, in which each session weighs 0.8 of the one after it; None without any."""
    weighted = sorted((value, _DECAY**age) for age, value in enumerate(reversed(values)))
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in weighted:
        half -= weight
        if half <= 0:
            return value
    return None


def recall(config: pytest.Config) -> Durations:
    """What is remembered; nothing where pytest has no cache, or something else is found in it."""
    cache = getattr(config, "cache", None)
    found = cache.get(KEY, None) if cache is not None else None
    return found if isinstance(found, dict) else {}


def expected_times(durations: Durations, tests: Sequence[tuple[str, str]]) -> list[float | None]:
    """Seconds for each of `tests`, a node id and a kind; None where none are remembered."""
    return [expected(durations.get(nodeid, {}).get(kind, ())) for nodeid, kind in tests]


def remember(durations: Durations, times: Mapping[str, float], kinds: Mapping[str, str]) -> Durations:
    """`durations` with the `times` of another session, whose tests ran on `kinds`."""
    kept = dict(durations)
    for nodeid, seconds in times.items():
        kind = kinds[nodeid]
        earlier = kept.pop(nodeid, {})
        kept[nodeid] = earlier | {kind: [*earlier.get(kind, ()), round(seconds, 4)][-_KEPT:]}
    return dict(list(kept.items())[-_TESTS:])


class Recorder:
    """Adds the times of a session's tests that passed, all phases of each together, to those that are remembered."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        """`kinds` of device by node id."""
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
