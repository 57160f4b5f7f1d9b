"""Data that plugins and conftests send from ranks to the driver with a test report (`pytest_accel_rank_data`)."""

from __future__ import annotations

from marshal import dumps
from typing import Any

import pytest

OWN_PREFIX = "pytest_accel:"
"""Prefix of the keys that are reserved for pytest-accel, used in `pytest_accel.features.plugins`."""
FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)
"""Exceptions of a hook implementation that fail the test."""


class RankDataError(Exception):
    """An implementation of `pytest_accel_rank_data` raised, or returned data that is not plain or a key in use."""


def collect(item: pytest.Item, report: pytest.TestReport) -> bytes:
    """Return the data of all implementations of `pytest_accel_rank_data`, as marshal writes it; empty if there is none.

    Raise :class:`RankDataError` if it is invalid.
    """
    collected: dict[str, Any] = {}
    for answer in item.ihook.pytest_accel_rank_data(item=item, report=report):
        for key, value in answer.items():
            if key in collected:
                raise RankDataError(f"pytest_accel_rank_data: two implementations returned the key {key!r}")
            try:
                dumps(value)  # All other types, also derived types, are errors for marshal.
            except ValueError:
                raise RankDataError(
                    f"pytest_accel_rank_data returned {key}=... with a value that is not plain; "
                    "expected None, bool, int, float, str, bytes, or lists, tuples and dicts of these"
                ) from None
            collected[key] = value
    return dumps(collected) if collected else b""
