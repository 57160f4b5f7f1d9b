"""pytest-durations: the times of a marked test and of its fixtures are those of the slowest rank."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import pytest

from pytest_accel.bridges.internals import of_class, require, take

_NAME = "pytest-durations"
_PHASES = {"setup": "TEST_SETUP", "call": "TEST_CALL", "teardown": "TEST_TEARDOWN"}
"""pytest-durations' names of a test's phases."""

Times = Mapping[str, Mapping[str, list[float]]]
"""Seconds, by category and then by the name of a test or fixture."""


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends the times of a rank; None if pytest-durations is off."""
    plugin = _plugin(config)
    return _InRank(plugin) if plugin is not None else None


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that replaces the driver's times by the ranks'; None if pytest-durations is off.

    In the driver the first phase takes as long as all phases in the ranks.
    """
    plugin = _plugin(config)
    return _InDriver(plugin) if plugin is not None else None


def _plugin(config: pytest.Config) -> Any:
    """Return pytest-durations' object that measures; None if neither of its reports is asked for."""
    if not (config.getoption("--pytest-durations") or config.getoption("--pytest-durations-json")):
        return None
    plugin = of_class(config, _NAME, "pytest_durations.plugin", "PytestDurationPlugin")
    require(_NAME, plugin, "measurements")
    require(_NAME, _categories(), *_PHASES.values())
    return plugin


def _categories() -> Any:
    return take(_NAME, "pytest_durations.types", "Category")


class _InRank:
    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    def pytest_accel_rank_data(self) -> dict[str, Any] | None:
        measured = {category: dict(times) for category, times in self._plugin.measurements.items() if times}
        for times in self._plugin.measurements.values():
            times.clear()
        return {_NAME: measured} if measured else None


class _InDriver:
    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: Mapping[int, Mapping[str, Any]]
    ) -> None:
        sent: list[Times] = [data[_NAME] for data in rank_data.values() if _NAME in data]
        measured = self._plugin.measurements
        phase = getattr(_categories(), _PHASES[report.when])
        if any(item.nodeid in times.get(phase, ()) for times in sent):
            measured[phase][item.nodeid].pop()
        for category, times in _slowest(sent).items():
            for name, seconds in times.items():
                measured[category].setdefault(name, []).extend(seconds)


def _slowest(sent: list[Times]) -> dict[str, dict[str, list[float]]]:
    """Return the longest of the ranks' times, for each measurement."""
    merged: dict[str, dict[str, list[float]]] = {}
    for times in sent:
        for category, of_category in times.items():
            into = merged.setdefault(category, {})
            for name, seconds in of_category.items():
                into[name] = [max(pair) for pair in zip_longest(into.get(name, ()), seconds, fillvalue=0.0)]
    return merged
