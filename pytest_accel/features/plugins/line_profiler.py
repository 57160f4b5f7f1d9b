"""pytest-line-profiler: the line profile of a marked test is that of rank 0."""

from __future__ import annotations

import pytest

from pytest_accel.rank.context import RANK

_TEXTS = "_line_profile"
"""The attribute of the config in which pytest-line-profiler stores the text for each test."""


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends the profiles of rank 0; None in other ranks."""
    return _Profiles(config) if config.stash[RANK].rank == 0 else None


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that replaces the driver's profiles of marked tests, which are empty, by those of rank 0."""
    return _Profiles(config)


class _Profiles:
    def __init__(self, config: pytest.Config) -> None:
        self._texts: dict[str, str] = vars(config).setdefault(_TEXTS, {})

    def send(self, item: pytest.Item, report: pytest.TestReport) -> str | None:
        return self._texts.pop(item.nodeid, None)

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, str]) -> None:
        self._texts[item.nodeid] = sent[0]
