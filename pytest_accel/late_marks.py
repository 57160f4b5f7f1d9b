"""Failure of tests whose marks have changed since their collection. Imported when a marked test is called."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.marks import MarkFinder, Marks, mark_text
from pytest_accel.core.stash_keys import MARKED, OWNERS
from pytest_accel.verdict import phase_verdict

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem

_REPORTS = "accel-late-mark-reports"
"""Name of the plugin `_Reports`."""


def check(item: pytest.Item) -> None:
    """Raise an error if the marks of `item` are not those from which its plan was made."""
    marked: MarkedItem | None = item.stash.get(MARKED, None)
    planned, present = Marks() if marked is None else marked.marks, MarkFinder(item.config.stash[OWNERS]).find(item)
    if present == planned:
        return
    fail_expected(item.config)
    path, line, _ = item.location
    raise phase_verdict.not_run(f"{path}:{(line or 0) + 1}: {'; '.join(_changes(planned, present))}")


def fail_expected(config: pytest.Config) -> None:
    """Have tests with a mark xfail fail if they have not run as marked."""
    if not config.pluginmanager.has_plugin(_REPORTS):
        config.pluginmanager.register(_Reports(), _REPORTS)


def _changes(planned: Marks, present: Marks) -> list[str]:
    """Return a text on each mark that has changed, and where to change it."""
    changes = []
    for before, now in zip(planned, present, strict=True):
        if before is not None and now is not None:
            if before == now:
                continue
            what, where = f"{mark_text(before)} was changed to {mark_text(now)}", "change it"
        elif now is not None:
            what, where = f"{mark_text(now)} was added", "add it"
        elif before is not None:
            what, where = f"{mark_text(before)} was removed", "remove it"
        else:
            continue
        changes.append(f"the mark {what} after collection; {where} in pytest_collection_modifyitems")
    return changes


class _Reports:
    """Reports an error of the plugin by its cause, also for a test with a mark xfail: it has not run as marked."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        error = call.excinfo.value if call.excinfo is not None else None
        if not phase_verdict.has_run(error):
            if hasattr(report, "wasxfail"):
                del report.wasxfail
                report.outcome = "failed"
            phase_verdict.put_cause_first(report, error)
        return report
