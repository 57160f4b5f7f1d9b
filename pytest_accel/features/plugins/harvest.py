"""pytest-harvest: results bags and saved fixtures of marked tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_accel.features.plugins.internals import take
from pytest_accel.rank.rank_data import RankDataError

_RESULTS = ("session_results_dct", "session_results_df", "module_results_dct", "module_results_df")
"""Fixtures with the results of the tests that have run before: only the driver has them."""


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that sends the values that a test has stored in a rank."""
    return _InRank()


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that stores these values in the driver."""
    return _Stored()


class _Stored:
    """Sends the values that tests have stored in a rank, and stores them in the driver."""

    def __init__(self) -> None:
        self._store: dict[str, Any] = take("pytest_harvest.plugin", "FIXTURE_STORE")
        self._bag_class: Any = take("pytest_harvest.results_bags", "ResultsBag")

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, tuple[Any, bool]] | None:
        """Return each stored value as plain data, and whether it is a results bag, by the name of its fixture."""
        if report.when != "teardown":
            return None
        stored = {name: values.pop(item.nodeid) for name, values in self._store.items() if item.nodeid in values}
        return {
            name: (_plain(name, value), isinstance(value, self._bag_class)) for name, value in stored.items()
        } or None

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, tuple[Any, bool]]]) -> None:
        """Store each value, and each entry of a results bag, of the lowest rank that has it."""
        for rank in reversed(sent):
            for name, (value, is_bag) in sent[rank].items():
                values = self._store.setdefault(name, {})
                values[item.nodeid] = self._bag_class({**values.get(item.nodeid, {}), **value}) if is_bag else value


class _InRank(_Stored):
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if fixturedef.argname in _RESULTS:
            pytest.fail(
                f"the fixture {fixturedef.argname} does not work in ranks, because only the driver has the results; "
                "request it in a test without the marks, or in pytest_sessionfinish",
                pytrace=False,
            )


def _plain(name: str, value: Any) -> Any:
    """Return `value` as plain data: numbers of numpy and tensors without dimensions become Python's numbers."""
    if isinstance(value, Mapping):
        return {key: _plain(f"{name}[{key!r}]", part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_plain(f"{name}[{at}]", part) for at, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, bytes):
        return bytes(value)
    raise RankDataError(
        f"pytest-harvest: {name} is of type {type(value).__module__}.{type(value).__qualname__}, which cannot be sent "
        "from a rank; store numbers, strings, bytes, None, or lists, tuples and dicts of these"
    )
