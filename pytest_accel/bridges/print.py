"""pytest-print: lines that a test prints in ranks are shown at the driver's terminal at the end of the phase."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pytest_accel.rank.context import RANK

_KEY = "pytest-print"


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that collects the lines; None with ``-s``, or without a terminal."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return None if reporter is None or config.stash[RANK].session.streams else _Lines(reporter)


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that shows the lines."""
    from pytest_accel.core.terminal_lines import write_line

    return _Show(partial(write_line, config))


class _Lines:
    """Lines that tests have written with the terminal reporter of a rank, which shows nothing."""

    def __init__(self, reporter: Any) -> None:
        self._lines: list[str] = []
        reporter.write_line = self._write_line

    def _write_line(self, line: str | bytes, **markup: bool) -> None:
        text = line if isinstance(line, str) else line.decode(errors="replace")
        self._lines += text.split("\n")

    def pytest_accel_rank_data(self) -> dict[str, Any] | None:
        lines, self._lines = self._lines, []
        return {_KEY: lines} if lines else None


class _Show:
    """Shows the lines of all ranks with `write_line`."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line = write_line

    def pytest_accel_merge(self, rank_data: dict[int, dict[str, Any]]) -> None:
        for rank, data in sorted(rank_data.items()):
            for line in data.get(_KEY, ()):
                self._write_line(f"[rank {rank}] {line}")
