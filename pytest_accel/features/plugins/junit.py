"""pytest's own ``--junitxml``: test case attributes and suite properties that tests record on rank 0."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.core.shims import forget_junit_log, junit_log, make_junit_log
from pytest_accel.rank.context import RANK


def in_rank(config: pytest.Config) -> object | None:
    """Return the plugin that sends the data recorded on rank 0; None if no file would contain it."""
    arguments = config.known_args_namespace
    if getattr(arguments, "numprocesses", None) or getattr(arguments, "tx", None):
        return None  # pytest has no junit log in xdist workers: recorded data is lost there, without a warning.
    log = make_junit_log(config)
    return None if log is None else _InRank(config, log)


def in_driver(config: pytest.Config) -> object | None:
    """Return the plugin that adds this data to the file; None if this process writes none."""
    log = junit_log(config)
    return None if log is None else _InDriver(log)


class _InRank:
    """Sends what the fixtures of pytest's plugin have recorded in the `log` of a rank."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        self._config = config
        self._log = log

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        if report.when != "teardown":
            return None
        attributes = [pair for reporter in self._log.node_reporters_ordered for pair in reporter.attrs.items()]
        properties, self._log.global_properties = self._log.global_properties, []
        self._log.node_reporters.clear()
        self._log.node_reporters_ordered.clear()
        if self._config.stash[RANK].rank or not (attributes or properties):
            return None
        return {"attributes": attributes, "properties": properties}

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        forget_junit_log(self._config)  # pytest's plugin would unregister the log a second time.


class _InDriver:
    def __init__(self, log: Any) -> None:
        self._log = log

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        for name, value in sent[0]["attributes"]:
            self._log.node_reporter(report).add_attribute(name, value)
        for name, value in sent[0]["properties"]:
            self._log.add_global_property(name, value)
