"""pytest-bdd: the steps of a scenario, for ``--cucumberjson`` and ``--gherkin-terminal-reporter``."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.features.plugins.unknown_releases import WithoutBridge, take

WITHOUT = WithoutBridge("pytest-bdd", "the steps of scenarios")

_REPORTING = "pytest_bdd.reporting"


def plugin(config: pytest.Config) -> object:
    """Return the plugin that brings the steps of ranks to the driver's reports."""
    return _Steps()


class _Steps:
    def __init__(self) -> None:
        self._contexts = take(_REPORTING, "test_report_context_registry")
        """pytest-bdd's `ReportContext` of each report of a scenario."""
        self._context_class = take(_REPORTING, "ReportContext")

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        context = self._contexts.get(report)
        return None if context is None else context.scenario

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        """Show the steps of the first rank in which one failed; of the first rank if none did."""
        scenarios = list(sent.values())
        failed = [one for one in scenarios if any(step["failed"] for step in one["steps"])]
        self._contexts[report] = self._context_class(scenario=(failed or scenarios)[0], name=item.name)
