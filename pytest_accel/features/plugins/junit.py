"""pytest's own ``--junitxml``: test case attributes and suite properties that tests record in ranks."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pytest_accel.core.shims import forget_junit_log, junit_log, make_junit_log
from pytest_accel.features.plugins.by_rank import by_name, merge_equal, number_of_ranks


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends the data recorded in a rank; None if no file would contain it."""
    arguments = config.known_args_namespace
    if getattr(arguments, "numprocesses", None) or getattr(arguments, "tx", None):
        return None  # pytest has no junit log in xdist workers: recorded data is lost there, without a warning.
    log = make_junit_log(config)
    return None if log is None else _InRank(config, log)


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds the ranks' data to the file; None if this process writes none."""
    log = junit_log(config)
    return None if log is None else _InDriver(log)


class _InRank:
    """Sends the data that the fixtures of pytest's plugin have recorded in the `log` of a rank."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        self._config = config
        self._log = log
        self._of_fixtures: list[tuple[str, str]] = []
        """Suite properties that fixtures with a scope wider than a function have recorded."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        before = len(self._log.global_properties)
        result = yield
        if fixturedef.scope != "function":
            self._of_fixtures += self._log.global_properties[before:]
            del self._log.global_properties[before:]
        return result

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        log = self._log
        if not (log.node_reporters_ordered or log.global_properties or self._of_fixtures):
            return None
        attributes: dict[str, str] = {}
        for reporter in log.node_reporters_ordered:
            attributes |= reporter.attrs
        properties, log.global_properties = log.global_properties, []
        of_fixtures, self._of_fixtures = self._of_fixtures, []
        if report.when == "teardown":  # Earlier, the test may still use a reporter.
            log.node_reporters.clear()
            log.node_reporters_ordered.clear()
        return {"attributes": attributes, "properties": properties, "of_fixtures": of_fixtures}

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        forget_junit_log(self._config)  # pytest's plugin would unregister the log a second time.


class _InDriver:
    def __init__(self, log: Any) -> None:
        self._log = log
        self._of_fixtures: set[tuple[str, str]] = set()

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        # Names of XML attributes cannot have spaces or brackets.
        for name, value in by_name({rank: one["attributes"] for rank, one in sent.items()}, ".rank{}").items():
            self._log.node_reporter(report).add_attribute(name, value)
        # Fixtures of a wider scope are set up once in each world: add their properties only once.
        new = [one for one in _merged(sent, "of_fixtures", item) if one not in self._of_fixtures]
        self._of_fixtures.update(new)
        for name, value in new + _merged(sent, "properties", item):
            self._log.add_global_property(name, value)


def _merged(sent: dict[int, dict[str, Any]], kind: str, item: pytest.Item) -> list[tuple[str, str]]:
    merged = merge_equal({rank: one[kind] for rank, one in sent.items()}, number_of_ranks(item))
    return [(f"{name}{label}", value) for label, (name, value) in merged]
