"""pytest-bdd: the steps of a scenario, for ``--cucumberjson`` and ``--gherkin-terminal-reporter``."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest

from pytest_accel.bridges.internals import take

_NAME = "pytest-bdd"
_MODULE = "pytest_bdd.reporting"

Contexts = MutableMapping[pytest.TestReport, Any]
"""pytest-bdd's `ReportContext` of each report of a scenario."""


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that sends the steps of a rank."""
    return _Rank(_contexts())


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that adds the steps to the driver's reports."""
    return _Driver(_contexts(), take(_NAME, _MODULE, "ReportContext"))


def _contexts() -> Any:
    return take(_NAME, _MODULE, "test_report_context_registry")


class _Rank:
    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts

    def pytest_accel_rank_data(self, report: pytest.TestReport) -> dict[str, Any] | None:
        context = self._contexts.get(report)
        return None if context is None else {_NAME: context.scenario}


class _Driver:
    def __init__(self, contexts: Contexts, context_class: Any) -> None:
        self._contexts = contexts
        self._context_class = context_class

    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]
    ) -> None:
        """Show the steps of the first rank in which one failed; of the first rank if none did."""
        scenarios = [data[_NAME] for _, data in sorted(rank_data.items()) if _NAME in data]
        if scenarios:
            failed = [one for one in scenarios if any(step["failed"] for step in one["steps"])]
            self._contexts[report] = self._context_class(scenario=(failed or scenarios)[0], name=item.name)
