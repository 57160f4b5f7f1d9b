"""teamcity-messages, used by PyCharm too: the two sides of a comparison that failed in a rank."""

from __future__ import annotations

from importlib import import_module
from pprint import pformat
from typing import Any

import pytest

from pytest_accel.features.plugins.internals import take
from pytest_accel.rank.context import RANK

Comparison = tuple[str, Any, Any]
"""An operator, and the values on its left and right side."""


def plugin(config: pytest.Config) -> object | None:
    """Return the plugin that passes failed comparisons to teamcity-messages; None if no runner listens."""
    option = config.option
    if option.no_teamcity or not (option.teamcity or import_module("teamcity").is_running_under_teamcity()):
        return None
    if RANK not in config.stash:
        return _Driver(take("teamcity.pytest_plugin", "_ASSERTION_FAILURE_KEY"))
    option.verbose = 2  # The plugin sets it too: explanations of asserts are not truncated.
    return _Rank()


class _Rank:
    def __init__(self) -> None:
        self._compared: Comparison | None = None

    def pytest_runtest_setup(self) -> None:
        self._compared = None

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        self._compared = op, _shown(left), _shown(right)

    def send(self, item: pytest.Item, report: pytest.TestReport) -> Comparison | None:
        return self._compared if report.failed else None


class _Driver:
    def __init__(self, attribute: str) -> None:
        """`attribute` is the attribute of an item in which the plugin looks for a failed comparison."""
        self._attribute = attribute

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, Comparison]) -> None:
        setattr(item, self._attribute, next(iter(sent.values())))


def _shown(value: object) -> object:
    """Return `value` as the plugin would show it."""
    return value if type(value) in (int, str, bool) else pformat(value)
