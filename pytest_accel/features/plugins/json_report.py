"""pytest-json-report: metadata, output and log records of tests in ranks."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.features.plugins.by_rank import by_name, merge_equal, number_of_ranks, to_plain
from pytest_accel.features.plugins.unknown_releases import WithoutBridge

WITHOUT = WithoutBridge("pytest-json-report", "the metadata, output and log records of ranks")

_EXTRA = "_json_report_extra"
"""The attribute of an item in which the plugin stores output and log records by phase, and ``metadata``."""


def plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds the ranks' data to marked items; None if pytest-json-report is off."""
    return _Extra() if config.option.json_report else None


class _Extra:
    def send(self, item: pytest.Item, report: pytest.TestReport) -> object:
        extra = getattr(item, _EXTRA)
        stage = {name: value for name, value in extra.get(report.when, {}).items() if value}
        metadata = extra.get("metadata", {})
        return to_plain({"stage": stage, "metadata": metadata}) if stage or metadata else None

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        extra, ranks = getattr(item, _EXTRA), number_of_ranks(item)
        stage = extra.setdefault(report.when, {})
        for name in ("stdout", "stderr"):
            written = {rank: [one["stage"][name]] for rank, one in sent.items() if name in one["stage"]}
            if written:
                stage[name] = "\n".join(
                    f"{label.lstrip()}\n{text}" if label else text for label, text in merge_equal(written, ranks)
                )
        records = {rank: one["stage"].get("log", []) for rank, one in sent.items()}
        logged = [
            {**record, "msg": f"{record['msg']}{label}"} for label, record in merge_equal(records, ranks, _content)
        ]
        if logged:
            stage["log"] = [*stage.get("log", ()), *logged]
        metadata = by_name({rank: one["metadata"] for rank, one in sent.items()})
        if metadata:
            extra.setdefault("metadata", {}).update(metadata)


def _content(record: dict[str, Any]) -> str:
    """Return the parts of a log record that do not depend on process and time, for comparison."""
    return repr([record.get(name) for name in ("name", "levelno", "pathname", "lineno", "msg")])
