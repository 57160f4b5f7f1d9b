"""pytest-monitor: one row for each marked test, with the largest numbers of its ranks, in the driver's database."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.features.plugins.by_rank import number_of_ranks
from pytest_accel.features.plugins.internals import require, take

_BASE = "_PyTestMonitorSession__mem_usage_base"
"""The attribute of pytest-monitor's session with the memory of the process at its start."""
_ROW = (
    *("item", "path", "variant", "location", "kind", "component"),
    *("start", "seconds", "user_seconds", "kernel_seconds", "memory"),
)
"""The arguments of pytest-monitor's `add_test_info`, in their order."""
_LARGEST = ("seconds", "user_seconds", "kernel_seconds", "memory")


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends a rank's rows to the driver, not to a database; None if nothing is measured."""
    option = config.option
    if option.mtr_none:
        return None
    option.mtr_db_out, option.mtr_no_db, option.mtr_remote = "", False, None
    in_rank = _InRank()
    _session_class().add_test_info = lambda one, *values: in_rank.add(one, *values)
    return in_rank


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that writes the rows of marked tests; None if nothing is measured."""
    if config.option.mtr_none:
        return None
    if "module" in config.option.mtr_scope:
        raise pytest.UsageError(
            f"--restrict-scope-to={config.option.mtr_scope}: pytest-monitor cannot measure a module whose tests run in "
            "other processes (its marked tests run in ranks); use --restrict-scope-to=function"
        )
    require(_session_class(), "add_test_info")
    return _InDriver()


def _session_class() -> Any:
    return take("pytest_monitor.session", "PyTestMonitorSession")


class _InRank:
    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, session: Any, *values: Any) -> None:
        """Store a row that pytest-monitor would write."""
        require(session, _BASE)
        row = dict(zip(_ROW, values, strict=True))
        if row["kind"] == "function":
            self._rows.append({**row, "memory": float(row["memory"]) - getattr(session, _BASE)})

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        rows, self._rows = self._rows, []
        return rows[-1] if rows else None


class _InDriver:
    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        if len(sent) < number_of_ranks(item):
            return  # The test failed on some rank, and pytest-monitor has no row for a test that failed.
        rows = list(sent.values())
        row = {**rows[0], **{name: max(one[name] for one in rows) for name in _LARGEST}}
        session = item.session.pytest_monitor  # type: ignore[attr-defined]
        require(session, _BASE)
        session.add_test_info(*({**row, "memory": row["memory"] + getattr(session, _BASE)}.values()))
