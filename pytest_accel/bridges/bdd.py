"""pytest-bdd: the steps of a scenario, for ``--cucumberjson`` and ``--gherkin-terminal-reporter``."""

from __future__ import annotations

from typing import Any

import pytest

_KEY = "pytest_bdd"


def rank_plugin(config: pytest.Config) -> object:
    return _Rank()


def driver_plugin(config: pytest.Config) -> object:
    return _Driver()


class _Rank:
    def pytest_accel_rank_data(self, report: pytest.TestReport) -> dict[str, Any] | None:
        from pytest_bdd.reporting import test_report_context_registry

        context = test_report_context_registry.get(report)
        return None if context is None else {_KEY: context.scenario}


class _Driver:
    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]
    ) -> None:
        """Show the steps of the first rank in which one failed; of the first rank if none did."""
        from pytest_bdd.reporting import ReportContext, test_report_context_registry

        scenarios = [data[_KEY] for _, data in sorted(rank_data.items()) if _KEY in data]
        if scenarios:
            failed = [one for one in scenarios if any(step["failed"] for step in one["steps"])]
            test_report_context_registry[report] = ReportContext(scenario=(failed or scenarios)[0], name=item.name)
