"""Tests of the uses of pytest's private attributes and classes that need no session."""

from __future__ import annotations

import pytest

from pytest_accel.compat.pytest_shims import is_subtest


class OwnReport(pytest.TestReport):
    pass


class SubTestReport(pytest.TestReport):
    """The class of pytest-subtests has this name."""


@pytest.mark.parametrize(("kind", "expected"), [(pytest.TestReport, False), (OwnReport, False), (SubTestReport, True)])
def test_a_subtests_report_is_known_by_its_class(kind: type[pytest.TestReport], expected: bool) -> None:
    report = kind("test_it.py::test_it", ("test_it.py", 1, "test_it"), {}, "passed", None, "call")
    report.context = "of any kind"  # type: ignore[attr-defined]
    assert is_subtest(report) is expected


def test_the_reports_of_pytests_subtests_are_known() -> None:
    subtests = pytest.importorskip("_pytest.subtests")
    assert is_subtest(subtests.SubtestReport("", ("", None, ""), {}, "passed", None, "call"))
