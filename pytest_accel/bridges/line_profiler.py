"""pytest-line-profiler: the line profile of a marked test is that of rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_accel.rank.context import RANK

_NAME = "pytest-line-profiler"
_TEXTS = "_line_profile"
"""The attribute of the config in which pytest-line-profiler stores the text for each test."""


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends the profiles of rank 0; None in other ranks."""
    return _InRank(config) if config.stash[RANK].rank == 0 else None


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that replaces the driver's profiles of marked tests, which are empty, by those of rank 0."""
    return _InDriver(config)


class _InRank:
    def __init__(self, config: pytest.Config) -> None:
        self._texts: dict[str, str] = {}
        vars(config)[_TEXTS] = self._texts

    def pytest_accel_rank_data(self, item: pytest.Item) -> dict[str, Any] | None:
        text = self._texts.pop(item.nodeid, None)
        return {_NAME: text} if text is not None else None


class _InDriver:
    def __init__(self, config: pytest.Config) -> None:
        self._texts: dict[str, str] = vars(config).setdefault(_TEXTS, {})

    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: Mapping[int, Mapping[str, Any]]
    ) -> None:
        if _NAME in rank_data.get(0, {}):
            self._texts[item.nodeid] = rank_data[0][_NAME]
