"""Data that plugins and conftests send from ranks to the driver, with the report of a test's phase."""

from __future__ import annotations

from typing import Any

import pytest

KEY = "accel_rank_data"
"""The name of the data in a report that a rank has serialized."""
OWN_PREFIX = "pytest_accel:"
"""The beginning of the keys that are this project's own: those of `pytest_accel.bridges`."""
FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)
"""What an implementation of the hooks may raise: it fails the test."""
_PLAIN = (type(None), bool, int, float, str, bytes)


class RankDataError(Exception):
    """A plugin sends what is not plain data, or under a key that another one uses, or has raised an error."""


class OwnData(dict[str, Any]):
    """Data that this project sends for another plugin: its keys, and no others, begin with `OWN_PREFIX`."""


def collect(item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
    """Return what all implementations of `pytest_accel_rank_data` send with `report`. Raises :class:`RankDataError`."""
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
    if type(value) in (list, tuple):
        for part in value:  # type: ignore[attr-defined]
            _check(part, place)
    elif type(value) is dict:
        for key, part in value.items():
            _check(key, place)
            _check(part, place)
    elif type(value) not in _PLAIN:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise RankDataError(
            f"{place}... with a value of type {kind}; "
            "expected None, bool, int, float, str, bytes, or lists, tuples and dicts of these"
        )
