"""pytest-metadata: changes that tests and fixtures make in ranks to the session's metadata."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.features.plugins.by_rank import by_name, to_plain
from pytest_accel.features.plugins.unknown_releases import WithoutBridge, take

WITHOUT = WithoutBridge("pytest-metadata", "the metadata that ranks change")


def plugin(config: pytest.Config) -> object | None:
    """Return the plugin that applies changes of the metadata in ranks to the session's metadata."""
    return _Changes(config.stash[take("pytest_metadata.plugin", "metadata_key")])


class _Changes:
    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self._sent: Any = to_plain(metadata)

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        if self._metadata == self._sent:
            return None
        now: Any = to_plain(self._metadata)
        changed = {name: value for name, value in now.items() if name not in self._sent or self._sent[name] != value}
        self._sent = now
        return changed or None

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        self._metadata.update(by_name(sent))
