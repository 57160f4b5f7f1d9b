"""pytest-print: lines that a test prints in ranks are shown at the driver's terminal at the end of the phase."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.core.terminal_lines import write_line
from pytest_accel.rank.context import RANK


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that collects the lines; None with ``-s``, or without a terminal."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return None if reporter is None or config.stash[RANK].session.streams else _InRank(reporter)


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that shows the lines."""
    return _InDriver()


class _InRank:
    """Sends the lines that tests write with the terminal reporter of a rank, which shows nothing."""

    def __init__(self, reporter: Any) -> None:
        self._lines: list[str] = []
        reporter.write_line = self._write_line

    def _write_line(self, line: str | bytes, **markup: bool) -> None:
        text = line if isinstance(line, str) else line.decode(errors="replace")
        self._lines += text.split("\n")

    def send(self, item: pytest.Item, report: pytest.TestReport) -> list[str] | None:
        lines, self._lines = self._lines, []
        return lines or None


class _InDriver:
    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, list[str]]) -> None:
        for rank, lines in sent.items():
            for line in lines:
                write_line(item.config, f"[rank {rank}] {line}")
