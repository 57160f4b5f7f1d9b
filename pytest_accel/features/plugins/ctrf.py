"""pytest-json-ctrf: metadata that tests record in ranks with its fixture."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.features.plugins.by_rank import by_name, to_plain
from pytest_accel.features.plugins.unknown_releases import WithoutBridge, take

WITHOUT = WithoutBridge("pytest-json-ctrf", "the metadata of ranks")


def plugin(config: pytest.Config) -> object | None:
    """Return the plugin that brings metadata from ranks to the driver's items; None if pytest-json-ctrf is off."""
    return _Metadata() if config.option.ctrf else None


class _Metadata:
    def __init__(self) -> None:
        self._attribute = str(take("ctrf.BaseMetadataReport", "metadata"))
        """The attribute of an item in which the plugin stores the metadata."""
        self._sent: object = {}

    def send(self, item: pytest.Item, report: pytest.TestReport) -> object:
        now = to_plain(getattr(item, self._attribute))
        if now == self._sent and report.when != "setup":
            return None
        self._sent = now
        return now

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        metadata = getattr(item, self._attribute)
        for name in dict.fromkeys(name for one in sent.values() for name in one):
            values = {rank: one[name] for rank, one in sent.items() if name in one}
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
