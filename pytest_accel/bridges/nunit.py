"""pytest-nunit, and pytest-azurepipelines on top of it: properties and attachments that tests record in ranks."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.bridges.by_rank import merge_equal, number_of_ranks, to_plain
from pytest_accel.bridges.internals import require

KEY = "nunit"
_LOG = "_nunitxml"
"""The attribute of the config with the data that the plugin writes in the end; absent in xdist workers."""


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends the properties and attachments of a rank."""
    recorder = _Recorder()
    setattr(config, _LOG, recorder)
    return _Rank(recorder)


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds properties and attachments to the file; None if this process writes none."""
    log = getattr(config, _LOG, None)
    if log is None:
        return None
    require("pytest-nunit", log, "node_reporter")
    return _Driver(log)


class _Recorder:
    """Replaces the plugin's log and its node reporter for the plugin's fixtures: stores their calls."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, Any, Any]] = []

    def node_reporter(self, nodeid: str) -> _Recorder:
        return self

    def add_property(self, name: str, value: object) -> None:
        self.recorded.append(("add_property", to_plain(name), to_plain(value)))

    def add_attachment(self, file: object, description: object) -> None:
        self.recorded.append(("add_attachment", to_plain(file), to_plain(description)))


class _Rank:
    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def pytest_accel_rank_data(self, report: pytest.TestReport) -> dict[str, Any] | None:
        # In the driver the plugin knows a test only after the report of its setup.
        if report.when == "setup" or not self._recorder.recorded:
            return None
        sent, self._recorder.recorded = self._recorder.recorded, []
        return {KEY: sent}


class _Driver:
    def __init__(self, log: Any) -> None:
        self._log = log

    def pytest_accel_merge(self, item: pytest.Item, rank_data: dict[int, dict[str, Any]]) -> None:
        received = {rank: data[KEY] for rank, data in rank_data.items() if KEY in data}
        reporter = self._log.node_reporter(item.nodeid)
        for label, (method, name, value) in merge_equal(received, number_of_ranks(item)):
            if method == "add_property":
                reporter.add_property(f"{name}{label}", value)
            else:
                reporter.add_attachment(name, f"{value}{label}")
