"""Hypothesis: statistics and failing examples of rank 0, for ``--hypothesis-show-statistics`` and Hypothesis's patches.

Hypothesis's plugin stores them on the item after the call phase, and reads them when the report of the teardown is
made. All ranks run the same examples, so those of rank 0 are enough.
"""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.features.plugins.unknown_releases import UnknownReleaseError, WithoutBridge
from pytest_accel.rank.context import RANK

WITHOUT = WithoutBridge("hypothesis", "the statistics (--hypothesis-show-statistics) and patches")

_OPTION = "--hypothesis-show-statistics"
_STATISTICS = "hypothesis_statistics"
_KEPT = (_STATISTICS, "_hypothesis_failing_examples")
"""Attributes of an item: the text of its statistics, and the calls of its failing examples as source code."""


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends statistics and examples from rank 0; None in other ranks."""
    return _Results() if config.stash[RANK].rank == 0 else None


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that stores them on the driver's items."""
    if config.getoption(_OPTION) and not _shows_statistics(config):
        raise UnknownReleaseError(_STATISTICS)
    return _Results()


def _shows_statistics(config: pytest.Config) -> bool:
    """Return whether Hypothesis's plugin reads the statistics from the item's attribute."""
    plugin: Any = config.pluginmanager.get_plugin("hypothesispytest")
    plugin = plugin or config.pluginmanager.get_plugin("_hypothesis_pytestplugin")
    code = getattr(getattr(plugin, "pytest_runtest_makereport", None), "__code__", None)
    return code is not None and _STATISTICS in (*code.co_names, *code.co_consts)


class _Results:
    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        if report.when != "call":
            return None
        return {name: vars(item)[name] for name in _KEPT if name in vars(item)} or None

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        vars(item).update(sent[0])
