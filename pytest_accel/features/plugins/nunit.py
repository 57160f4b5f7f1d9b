"""pytest-nunit, and pytest-azurepipelines on top of it: properties and attachments that tests record in ranks."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.features.plugins.by_rank import merge_equal, number_of_ranks, to_plain
from pytest_accel.features.plugins.internals import require

_LOG = "_nunitxml"
"""The attribute of the config with the data that the plugin writes in the end; absent in xdist workers."""

Call = tuple[str, object, object]
"""The name of a node reporter's method, and its arguments."""


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends the properties and attachments of a rank."""
    recorder = _InRank()
    setattr(config, _LOG, recorder)
    return recorder


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds properties and attachments to the file; None if this process writes none."""
    log = getattr(config, _LOG, None)
    if log is None:
        return None
    require(log, "node_reporter")
    return _InDriver(log)


class _InRank:
    """Replaces the plugin's log and its node reporter for the plugin's fixtures in a rank: sends their calls."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def node_reporter(self, nodeid: str) -> _InRank:
        return self

    def add_property(self, name: str, value: object) -> None:
        self._calls.append(("add_property", to_plain(name), to_plain(value)))

    def add_attachment(self, file: object, description: object) -> None:
        self._calls.append(("add_attachment", to_plain(file), to_plain(description)))

    def send(self, item: pytest.Item, report: pytest.TestReport) -> list[Call] | None:
        if report.when == "setup":  # In the driver the plugin knows a test only after the report of its setup.
            return None
        calls, self._calls = self._calls, []
        return calls or None


class _InDriver:
    def __init__(self, log: Any) -> None:
        self._log = log

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, list[tuple[str, Any, Any]]]) -> None:
        reporter = self._log.node_reporter(item.nodeid)
        for label, (method, name, value) in merge_equal(sent, number_of_ranks(item)):
            if method == "add_property":
                reporter.add_property(f"{name}{label}", value)
            else:
                reporter.add_attachment(name, f"{value}{label}")
