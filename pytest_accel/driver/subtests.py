"""Subtests of a marked test: one report for each, merged over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from pytest_accel.core.rank_messages import ExtraReport
from pytest_accel.core.rank_names import ranks_text


class Subtests:
    """The merged reports of a test's subtests, until they are sent to pytest. Owned by the test's `MarkedItem`."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._reports: list[pytest.TestReport] = []

    def add(self, extras: Iterable[tuple[int, ExtraReport]], ranks: int) -> int:
        """Merge the reports `extras` of the world's `ranks`; return how many subtests failed."""
        failed = 0
        seen: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = {}
        times: Counter[tuple[int, str]] = Counter()
        for rank, extra in extras:
            context = repr(extra.report.get("_subtest.context"))
            times[rank, context] += 1  # A rank may have several subtests with the same context.
            seen.setdefault((context, times[rank, context]), []).append((rank, extra.report))
        config = self._item.config
        for reports in seen.values():
            failures = [entry for entry in reports if entry[1]["outcome"] == "failed"]
            failed += bool(failures)
            _, data = (failures or reports)[0]
            report = config.hook.pytest_report_from_serializable(config=config, data=dict(data))
            if failures and ranks > 1:
                report.sections.append(("ranks", f"{ranks_text([rank for rank, _ in failures])} failed"))
            self._reports.append(report)
        return failed

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
