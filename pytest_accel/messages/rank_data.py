"""Data that plugins and conftests send from ranks to the driver with a test report (`pytest_accel_rank_data`)."""

from __future__ import annotations

from typing import Any

import pytest

KEY = "accel_rank_data"
"""Name of the data in a serialized report of a rank."""
OWN_PREFIX = "pytest_accel:"
"""Prefix of the keys that are reserved for pytest-accel, used in `pytest_accel.features.plugins`."""
FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)
"""Exceptions of a hook implementation that fail the test."""
PLAIN_TYPES = (type(None), bool, int, float, str, bytes)


class RankDataError(Exception):
    """An implementation of `pytest_accel_rank_data` raised, or returned data that is not plain or a key in use."""


class OwnData(dict[str, Any]):
    """Data that pytest-accel sends for another plugin. Only in this class may keys begin with `OWN_PREFIX`."""


def collect(item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
    """Return the data of all implementations of `pytest_accel_rank_data`. Raise :class:`RankDataError` if invalid."""
    collected: dict[str, Any] = {}
    for answer in item.ihook.pytest_accel_rank_data(item=item, report=report):
        if not isinstance(answer, dict):
            raise RankDataError(f"pytest_accel_rank_data returned {answer!r}; expected a dict or None")
        for key, value in answer.items():
            if not isinstance(key, str):
                raise RankDataError(f"pytest_accel_rank_data returned the key {key!r}; expected a str")
            if key.startswith(OWN_PREFIX) and not isinstance(answer, OwnData):
                raise RankDataError(
                    f"pytest_accel_rank_data returned the key {key!r}; "
                    f"keys that begin with {OWN_PREFIX!r} are reserved for pytest-accel: use another one"
                )
            if key in collected:
                raise RankDataError(f"pytest_accel_rank_data: two implementations returned the key {key!r}")
            _check(value, f"pytest_accel_rank_data returned {key}=")
            collected[key] = value
    return collected


def _check(value: object, place: str) -> None:
    """Raise :class:`RankDataError` if `value` is not plain; `place` begins the message."""
    if type(value) in (list, tuple):
        for part in value:  # type: ignore[attr-defined]
            _check(part, place)
    elif type(value) is dict:
        for key, part in value.items():
            _check(key, place)
            _check(part, place)
    elif type(value) not in PLAIN_TYPES:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise RankDataError(
            f"{place}... with a value of type {kind}; "
            "expected None, bool, int, float, str, bytes, or lists, tuples and dicts of these"
        )
