"""pytest-json-report: metadata, output and log records of tests in ranks."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.bridges.by_rank import by_name, merge_equal, number_of_ranks, to_plain

KEY = "json_report"
_EXTRA = "_json_report_extra"
"""The attribute of an item in which the plugin stores output and log records by phase, and ``metadata``."""


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends the data collected in a rank; None if pytest-json-report is off."""
    return _Rank() if config.option.json_report else None


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds the ranks' data to marked items; None if pytest-json-report is off."""
    return _Driver() if config.option.json_report else None


class _Rank:
    def pytest_accel_rank_data(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        extra = getattr(item, _EXTRA)
        stage = {name: value for name, value in extra.get(report.when, {}).items() if value}
        metadata = extra.get("metadata", {})
        return {KEY: to_plain({"stage": stage, "metadata": metadata})} if stage or metadata else None


class _Driver:
    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]
    ) -> None:
        received = {rank: data[KEY] for rank, data in rank_data.items() if KEY in data}
        extra, ranks = getattr(item, _EXTRA), number_of_ranks(item)
        stage = extra.setdefault(report.when, {})
        for name in ("stdout", "stderr"):
            written = {rank: [sent["stage"][name]] for rank, sent in received.items() if name in sent["stage"]}
            if written:
                stage[name] = "\n".join(
                    f"{label.lstrip()}\n{text}" if label else text for label, text in merge_equal(written, ranks)
                )
        records = {rank: sent["stage"].get("log", []) for rank, sent in received.items()}
        logged = [
            {**record, "msg": f"{record['msg']}{label}"} for label, record in merge_equal(records, ranks, _content)
        ]
        if logged:
            stage["log"] = [*stage.get("log", ()), *logged]
        metadata = by_name({rank: sent["metadata"] for rank, sent in received.items()})
        if metadata:
            extra.setdefault("metadata", {}).update(metadata)


def _content(record: dict[str, Any]) -> str:
    """Return the parts of a log record that do not depend on process and time, for comparison."""
    return repr([record.get(name) for name in ("name", "levelno", "pathname", "lineno", "msg")])
