"""teamcity-messages, used by PyCharm too: the two sides of a comparison that failed in a rank."""

from __future__ import annotations

from importlib import import_module
from pprint import pformat
from typing import Any

import pytest

from pytest_accel.bridges.internals import take

KEY = "teamcity"
_MODULE = "teamcity.pytest_plugin"


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends failed comparisons of a rank; None if no runner listens."""
    if not _is_enabled(config):
        return None
    config.option.verbose = 2  # The plugin sets it too: explanations of asserts are not truncated.
    return _Rank()


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that passes failed comparisons to teamcity-messages; None if no runner listens."""
    if not _is_enabled(config):
        return None
    return _Driver(take("teamcity-messages", _MODULE, "_ASSERTION_FAILURE_KEY"))


def _is_enabled(config: pytest.Config) -> bool:
    if config.option.no_teamcity:
        return False
    return bool(config.option.teamcity or import_module("teamcity").is_running_under_teamcity())


class _Rank:
    def __init__(self) -> None:
        self._compared: tuple[str, Any, Any] | None = None

    def pytest_runtest_setup(self) -> None:
        self._compared = None

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        self._compared = op, _shown(left), _shown(right)

    def pytest_accel_rank_data(self, report: pytest.TestReport) -> dict[str, Any] | None:
        return {KEY: self._compared} if report.failed and self._compared is not None else None


class _Driver:
    def __init__(self, attribute: str) -> None:
        """`attribute` is the attribute of an item in which the plugin looks for a failed comparison."""
        self._attribute = attribute

    def pytest_accel_merge(self, item: pytest.Item, rank_data: dict[int, dict[str, Any]]) -> None:
        for _, data in sorted(rank_data.items()):
            if KEY in data:
                setattr(item, self._attribute, data[KEY])
                return


def _shown(value: object) -> object:
    """Return `value` as the plugin would show it."""
    return value if type(value) in (int, str, bool) else pformat(value)
