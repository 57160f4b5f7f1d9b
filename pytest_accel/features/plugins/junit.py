"""pytest's own ``--junitxml``: test case attributes and suite properties that tests record on rank 0."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.compat.pytest_shims import forget_junit_log, junit_log, make_junit_log
from pytest_accel.rank.context import RANK


def in_rank(config: pytest.Config) -> object | None:
    """Return the plugin that sends the data recorded on rank 0; None if no file would contain it."""
    arguments = config.known_args_namespace
    if getattr(arguments, "numprocesses", None) or getattr(arguments, "tx", None):
        return None  # pytest has no junit log in xdist workers: recorded data is lost there, without a warning.
    return _of(config, make_junit_log(config))


def in_driver(config: pytest.Config) -> object | None:
    """Return the plugin that adds this data to the file; None if this process writes none."""
    return _of(config, junit_log(config))


def _of(config: pytest.Config, log: Any) -> object | None:
    return None if log is None else _Junit(log, config.stash.get(RANK, None))


class _Junit:
    """Sends the records of fixtures in the `log` of a rank, or adds them to the log of the driver."""

    def __init__(self, log: Any, rank: Any) -> None:
        self._log, self._rank = log, rank

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        if report.when != "teardown":
            return None
        attributes = [pair for reporter in self._log.node_reporters_ordered for pair in reporter.attrs.items()]
        properties, self._log.global_properties = self._log.global_properties, []
        self._log.node_reporters.clear()
        self._log.node_reporters_ordered.clear()
        of_rank_0 = self._rank is not None and self._rank.rank == 0 and (attributes or properties)
        return {"attributes": attributes, "properties": properties} if of_rank_0 else None

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        for name, value in sent[0]["attributes"]:
            self._log.node_reporter(report).add_attribute(name, value)
        for name, value in sent[0]["properties"]:
            self._log.add_global_property(name, value)

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if self._rank is not None:
            forget_junit_log(config)  # pytest's plugin would unregister the log a second time.
