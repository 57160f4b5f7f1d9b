"""Subtests of a marked test: sends their merged reports to pytest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from pytest_accel.compat.pytest_shims import report_from_data


class Subtests:
    """The merged reports of a test's subtests, until they are sent to pytest. Owned by the test's `MarkedItem`."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._reports: list[pytest.TestReport] = []

    def add(self, reports: Iterable[dict[str, Any]]) -> None:
        """Add merged `reports`, serialized as pytest does it."""
        config = self._item.config
        for data in reports:
            self._reports.append(report_from_data(config, data))

    def clear(self) -> None:
        """Forget the reports that have not been sent."""
        self._reports.clear()

    def send(self, test_report: pytest.TestReport) -> None:
        """Have pytest log the reports. `test_report` is the report of the phase to which the subtests belong."""
        reports, self._reports = self._reports, []
        for report in reports:
            if report.failed and test_report.skipped and hasattr(test_report, "wasxfail"):
                # The test is an expected failure, so its failed subtests are too.
                report.outcome, report.wasxfail = "skipped", test_report.wasxfail
            self._item.ihook.pytest_runtest_logreport(report=report)
