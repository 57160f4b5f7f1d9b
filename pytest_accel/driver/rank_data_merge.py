"""Has plugins merge the data that ranks have sent into the driver's report (`pytest_accel_merge`)."""

from __future__ import annotations

from collections.abc import Mapping
from traceback import format_exc
from typing import Any

import pytest

from pytest_accel.messages.rank_data import FAILURES


def merge(item: pytest.Item, report: pytest.TestReport, sent: Mapping[int, dict[str, Any]]) -> bool:
    """Have plugins merge the data that ranks have `sent` with a phase; return True if that has failed the report.

    A plugin that raises fails the test.
    """
    failed_before = report.failed
    try:
        item.ihook.pytest_accel_merge(item=item, report=report, rank_data=sent)
    except FAILURES as error:
        text = f"pytest_accel_merge raised {type(error).__name__}: {error}\n{format_exc()}"
        if failed_before:
            report.sections.append(("pytest_accel_merge", text))
        else:
            report.outcome, report.longrepr = "failed", text
    return report.failed and not failed_before
