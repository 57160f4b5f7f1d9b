"""The data that plugins have collected on rank 0, and its addition to their data in the driver.

If the test has failed on another rank only, the data of that rank is shown: a report must not show passed steps alone.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest

from pytest_accel.compat.pytest_shims import forget_junit_log, junit_log, make_junit_log
from pytest_accel.messages.serialization import plain
from pytest_accel.rank.context import RANK

UNKNOWN_RELEASE = (AttributeError, ImportError, LookupError, TypeError, ValueError)
"""Errors that an unknown release of a plugin may cause because it lacks names that are used."""


class Row(NamedTuple):
    """A plugin whose data of rank 0 is passed on."""

    plugin: str
    """Its name (`refusals.registered_name`)."""
    read: Callable[[pytest.Item, pytest.TestReport], Any]
    """Returns the data after a phase on rank 0, which may be empty."""
    add: Callable[[pytest.Item, pytest.TestReport, Any], object]
    """Adds this data to the item or the report in the driver."""

    def send(self, item: pytest.Item, report: pytest.TestReport) -> Any:
        """Return what rank 0 or a rank that has failed sends; None if there is no data."""
        if item.config.stash[RANK].rank and not report.failed:
            return None
        data = self.read(item, report)
        return {"failed": report.failed, "data": plain(data)} if data else None

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, Any]) -> None:
        """Add in the driver the data of the first rank that has failed, else of rank 0."""
        of_rank = next((one for one in sent.values() if one["failed"]), sent.get(0))
        if of_rank is not None:
            self.add(item, report, of_rank["data"])


def named(module: str, name: str) -> Any:
    """Return the object `name` of a plugin's `module`."""
    return getattr(import_module(module), name)


def _json_data(item: Any, report: pytest.TestReport) -> Any:
    names = (report.when,) if report.when == "teardown" else (report.when, "metadata")  # Not twice: see `Row.merge`.
    data = item._json_report_extra if item.config.option.json_report else {}
    return {name: data[name] for name in names if data.get(name)}


def _add_json_data(item: Any, report: pytest.TestReport, data: dict[str, Any]) -> None:
    for name, values in data.items():
        item._json_report_extra.setdefault(name, {}).update(values)


def _scenarios() -> Any:
    return named("pytest_bdd.reporting", "test_report_context_registry")


def _add_scenario(item: pytest.Item, report: pytest.TestReport, scenario: Any) -> None:
    _scenarios()[report] = named("pytest_bdd.reporting", "ReportContext")(scenario=scenario, name=item.name)


def junit(config: pytest.Config) -> object | None:
    """Make the log in which rank 0 records for ``--junitxml``; return the plugin that ends it, or None without a log.

    pytest has no log in xdist workers: what tests record is lost there, without a warning.
    """
    arguments = config.known_args_namespace
    distributed = getattr(arguments, "numprocesses", None) or getattr(arguments, "tx", None)
    return None if config.stash[RANK].rank or distributed or make_junit_log(config) is None else _JunitLog()


class _JunitLog:
    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        forget_junit_log(config)  # pytest's plugin would unregister the log a second time.


def _junit_data(item: pytest.Item, report: pytest.TestReport) -> Any:
    log = junit_log(item.config)
    if log is None or report.when != "teardown":
        return None
    attributes = [pair for reporter in log.node_reporters_ordered for pair in reporter.attrs.items()]
    properties, log.global_properties = log.global_properties, []
    log.node_reporters.clear()
    log.node_reporters_ordered.clear()
    return {"attributes": attributes, "properties": properties} if attributes or properties else None


def _add_junit_data(item: pytest.Item, report: pytest.TestReport, data: dict[str, Any]) -> None:
    if (log := junit_log(item.config)) is not None:
        for name, value in data["attributes"]:
            log.node_reporter(report).add_attribute(name, value)
        for name, value in data["properties"]:
            log.add_global_property(name, value)


_EXTRAS = "pytest_html.fixtures", "extras_stash_key"
ROWS = (
    Row(
        "_hypothesis_pytestplugin",
        lambda item, report: vars(item).get("hypothesis_statistics") if report.when == "call" else None,
        lambda item, report, data: vars(item).update(hypothesis_statistics=data),
    ),
    Row(
        "pytest_bdd.plugin",  # Without its scenario, cucumber's report would not have a marked test.
        lambda item, report: _scenarios()[report].scenario if report in _scenarios() else None,
        _add_scenario,
    ),
    Row(
        "pytest_html.plugin",
        lambda item, report: report.when == "call" and item.config.stash.get(named(*_EXTRAS), None),
        lambda item, report, extras: vars(report).update(extras=[*getattr(report, "extras", ()), *extras]),
    ),
    Row("pytest_jsonreport.plugin", _json_data, _add_json_data),
    Row("_pytest.junitxml", _junit_data, _add_junit_data),
)
