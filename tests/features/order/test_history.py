"""Tests of the durations of tests that pytest's cache keeps, and of the times expected from them."""

from __future__ import annotations

import math

import pytest

from pytest_accel.features.order.history import KEY, expected, expected_times, recall, remember


@pytest.mark.parametrize(
    ("values", "time"),
    [
        ([], None),
        ([3.0], 3.0),
        ([1.0, 9.0], 9.0),
        ([1.0, 9.0, 2.0], 2.0),
        ([9.0, 1.0, 1.0, 9.0, 9.0], 9.0),
        ([1.0, 1.0, 1.0, 1.0, 60.0], 1.0),
    ],
)
def test_the_expected_duration_is_a_weighted_median(values: list[float], time: float | None) -> None:
    assert expected(values) == time


def test_the_last_five_durations_are_kept_for_each_kind() -> None:
    durations = remember({}, [("t", "cuda", 1.0)])
    for seconds in (2.0, 3.0, 4.0, 5.0, 6.00001):
        durations = remember(durations, [("t", "cuda", seconds)])
    durations = remember(durations, [("t", "sim", 9.0)])
    assert durations == {"t": {"cuda": [2.0, 3.0, 4.0, 5.0, 6.0], "sim": [9.0]}}
    assert expected_times(durations, [("t", "cuda"), ("t", "xpu"), ("u", "cuda")]) == [5.0, None, None]


def test_durations_of_tests_that_did_not_run_are_kept() -> None:
    assert remember({"old": {"sim": [1.0]}}, [("new", "sim", 2.0)]) == {
        "old": {"sim": [1.0]},
        "new": {"sim": [2.0]},
    }


@pytest.mark.parametrize(
    "value", ["soon", None, math.nan, math.inf, -1.0, 10**400, [1.0]], ids=lambda value: str(value)[:9]
)
def test_a_damaged_value_of_the_cache_is_ignored(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    config = pytester.parseconfigure("-p", "accel")
    cache = getattr(config, "cache")  # noqa: B009 - pytest's class has no such attribute.
    cache.set(KEY, {"t": {"sim": [1.0]}})
    assert recall(config) == {"t": {"sim": [1.0]}}
    cache.set(KEY, {"t": {"sim": [1.0, value]}})
    assert recall(config) == {}
