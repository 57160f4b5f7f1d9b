"""pytest-durations: the times of a marked test and of its fixtures are those of the slowest rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import pytest

from pytest_accel.features.plugins.internals import of_class, require, take

_PHASES = {"setup": "TEST_SETUP", "call": "TEST_CALL", "teardown": "TEST_TEARDOWN"}
"""pytest-durations' names of a test's phases."""

Times = Mapping[str, Mapping[str, list[float]]]
"""Seconds, by category and then by the name of a test or fixture."""


def plugin(config: pytest.Config) -> object | None:
    """Return the plugin that replaces the driver's times by the ranks'; None if no report of pytest-durations is on.

    In the driver the first phase takes as long as all phases in the ranks.
    """
    if not (config.getoption("--pytest-durations") or config.getoption("--pytest-durations-json")):
        return None
    measuring = of_class(config, "pytest_durations.plugin", "PytestDurationPlugin")
    require(measuring, "measurements")
    require(_categories(), *_PHASES.values())
    return _SlowestRank(measuring.measurements)


def _categories() -> Any:
    return take("pytest_durations.types", "Category")


class _SlowestRank:
    def __init__(self, measurements: Any) -> None:
        self._measurements = measurements

    def send(self, item: pytest.Item, report: pytest.TestReport) -> Times | None:
        measured = {category: dict(times) for category, times in self._measurements.items() if times}
        for times in self._measurements.values():
            times.clear()
        return measured or None

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: Mapping[int, Times]) -> None:
        measured = self._measurements
        phase = getattr(_categories(), _PHASES[report.when])
        if any(item.nodeid in times.get(phase, ()) for times in sent.values()):
            measured[phase][item.nodeid].pop()
        given = [*sent.values()]
        if report.failed:  # A rank that died or hung has sent nothing, and may be the slowest.
            given.append({phase: {item.nodeid: [report.duration]}})
        for category, times in _slowest(given).items():
            for name, seconds in times.items():
                measured[category].setdefault(name, []).extend(seconds)


def _slowest(sent: Iterable[Times]) -> dict[str, dict[str, list[float]]]:
    """Return the longest of the ranks' times, for each measurement."""
    merged: dict[str, dict[str, list[float]]] = {}
    for times in sent:
        for category, of_category in times.items():
            into = merged.setdefault(category, {})
            for name, seconds in of_category.items():
                into[name] = [max(pair) for pair in zip_longest(into.get(name, ()), seconds, fillvalue=0.0)]
    return merged
