"""pytest-json-ctrf: what its fixture, which runs in ranks, notes of a test."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.bridges.by_rank import by_name, plain
from pytest_accel.bridges.internals import take

KEY = "ctrf"


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends what the fixture of pytest-json-ctrf has noted in a rank; None if it is off."""
    return _Rank(_attribute()) if config.option.ctrf else None


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds this to the items of marked tests; None if pytest-json-ctrf is off."""
    return _Driver(_attribute()) if config.option.ctrf else None


def _attribute() -> str:
    """Return the attribute of an item in which the plugin keeps what its fixture notes."""
    return str(take("pytest-json-ctrf", "ctrf.BaseMetadataReport", "metadata"))


class _Rank:
    def __init__(self, attribute: str) -> None:
        self._attribute = attribute
        self._sent: object = {}

    def pytest_accel_rank_data(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        now = plain(getattr(item, self._attribute))
        if now == self._sent and report.when != "setup":
            return None
        self._sent = now
        return {KEY: now}


class _Driver:
    def __init__(self, attribute: str) -> None:
        self._attribute = attribute

    def pytest_accel_merge(self, item: pytest.Item, rank_data: dict[int, dict[str, Any]]) -> None:
        said = {rank: data[KEY] for rank, data in sorted(rank_data.items()) if KEY in data}
        metadata = getattr(item, self._attribute)
        for name in dict.fromkeys(name for sent in said.values() for name in sent):
            values = {rank: sent[name] for rank, sent in said.items() if name in sent}
            first = next(iter(values.values()))
            if name == "tags":
                tags = [tag for own in values.values() for tag in own]
                metadata[name] = list(dict.fromkeys([*map(_tag, item.iter_markers("xfail")), *tags]))
            else:
                metadata[name] = by_name(values) if isinstance(first, dict) else first


def _tag(mark: pytest.Mark) -> str:
    """Return the tag that the plugin makes of a mark `xfail`, which no test has in a rank: the driver judges it."""
    named = (f"{name}_{value}" for name, value in mark.kwargs.items())
    return "::".join(map(str, (mark.name, *mark.args, *named)))
