"""pytest-json-ctrf: metadata that tests record in ranks with its fixture."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.bridges.by_rank import by_name, to_plain
from pytest_accel.bridges.internals import take

KEY = "ctrf"


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends the metadata recorded in a rank; None if pytest-json-ctrf is off."""
    return _Rank(_attribute()) if config.option.ctrf else None


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds the metadata to marked items; None if pytest-json-ctrf is off."""
    return _Driver(_attribute()) if config.option.ctrf else None


def _attribute() -> str:
    """Return the attribute of an item in which the plugin stores the metadata."""
    return str(take("pytest-json-ctrf", "ctrf.BaseMetadataReport", "metadata"))


class _Rank:
    def __init__(self, attribute: str) -> None:
        self._attribute = attribute
        self._sent: object = {}

    def pytest_accel_rank_data(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        now = to_plain(getattr(item, self._attribute))
        if now == self._sent and report.when != "setup":
            return None
        self._sent = now
        return {KEY: now}


class _Driver:
    def __init__(self, attribute: str) -> None:
        self._attribute = attribute

    def pytest_accel_merge(self, item: pytest.Item, rank_data: dict[int, dict[str, Any]]) -> None:
        received = {rank: data[KEY] for rank, data in sorted(rank_data.items()) if KEY in data}
        metadata = getattr(item, self._attribute)
        for name in dict.fromkeys(name for sent in received.values() for name in sent):
            values = {rank: sent[name] for rank, sent in received.items() if name in sent}
            first = next(iter(values.values()))
            if name == "tags":
                tags = [tag for own in values.values() for tag in own]
                metadata[name] = list(dict.fromkeys([*map(_tag, item.iter_markers("xfail")), *tags]))
            else:
                metadata[name] = by_name(values) if isinstance(first, dict) else first


def _tag(mark: pytest.Mark) -> str:
    """Return the tag that the plugin makes of a mark `xfail`. Ranks do not have it: the driver applies it."""
    named = (f"{name}_{value}" for name, value in mark.kwargs.items())
    return "::".join(map(str, (mark.name, *mark.args, *named)))
