"""Serialization of pytest's reports in a rank, with the data that plugins send with them."""

from __future__ import annotations

from traceback import format_exc
from typing import Any

import pytest

from pytest_accel.core import rank_data
from pytest_accel.core.rank_messages import ExceptionSketch
from pytest_accel.core.serialization import plain_properties, sketch, travels
from pytest_accel.core.shims import report_to_data
from pytest_accel.core.truncation import cut, cut_failure

_PASSED_FIELDS = ("outcome", "longrepr", "sections", "user_properties", "duration", "start", "stop", "wasxfail")
"""The fields of a report of a passed phase that the merged report uses.

Serializing the others, mainly keywords, takes longer than many tests.
"""


def serialize(config: pytest.Config, report: pytest.TestReport, *, whole: bool) -> dict[str, Any]:
    """Return `report` as ``pytest_report_to_serializable`` does, with long text truncated.

    If not `whole`, leave out what the merged report of a phase does not use.
    """
    if report.passed and not whole:
        data = {name: vars(report)[name] for name in _PASSED_FIELDS if name in vars(report)}
        data |= {"$report_type": "TestReport", "user_properties": plain_properties(report.user_properties)}
    else:
        data = report_to_data(config, report)
        if "$report_type" in data and isinstance(report, pytest.TestReport):
            data["$report_type"] = "TestReport"  # The driver does not know a suite's own class of reports.
        if config.get_verbosity() < 2:
            cut_failure(data.get("longrepr"))
        data["user_properties"] = plain_properties(data.get("user_properties", ()))
        data = {name: value for name, value in data.items() if travels(value)}
    data["sections"] = [(name, cut(text)) for name, text in data.get("sections", ())]
    return data


def collect_rank_data(item: pytest.Item, report: pytest.TestReport) -> tuple[dict[str, Any], ExceptionSketch | None]:
    """Return the data that plugins send with `report`, and the exception if collecting the data has made `report` fail.

    If the report has failed before, an error in the data is only added to it as a section.
    """
    try:
        return rank_data.collect(item, report), None
    except rank_data.FAILURES as error:
        text = str(error)
        if not isinstance(error, rank_data.RankDataError):
            text = f"pytest_accel_rank_data raised {type(error).__name__}: {error}\n{format_exc()}"
        if report.failed:
            report.sections.append(("pytest_accel_rank_data", text))
            return {}, None
        report.outcome, report.longrepr = "failed", text
        return {}, sketch(rank_data.RankDataError(text))
