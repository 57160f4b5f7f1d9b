"""The failed subtests of running tests."""

from __future__ import annotations

import pytest


class FailedSubtests:
    """Finds tests that fail because of a subtest: when pytest logs the report of their call, it says that they passed.

    Owned by a plugin that passes it each report of a phase or a subtest.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[object, str], pytest.TestReport] = {}

    def add(self, report: pytest.TestReport) -> None:
        """Keep `report`, that of a subtest, if it is the first failed one of its test."""
        if report.failed:
            self._first.setdefault(_run(report), report)

    def pop(self, report: pytest.TestReport) -> pytest.TestReport | None:
        """Return the first failed subtest of a call that has passed but for its subtests; None if there is none."""
        if report.when != "call" or not self._first:
            return None
        first = self._first.pop(_run(report), None)
        return first if report.passed else None


def _run(report: pytest.TestReport) -> tuple[object, str]:
    return getattr(report, "node", None), report.nodeid
