"""pytest-metadata: changes that tests and fixtures make in ranks to the session's metadata."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.bridges.by_rank import by_name, to_plain
from pytest_accel.bridges.internals import take

KEY = "metadata"


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends changes of the metadata in a rank."""
    return _Rank(config.stash[_key()])


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that applies these changes to the session's metadata."""
    return _Driver(config.stash[_key()])


def _key() -> pytest.StashKey[dict[str, Any]]:
    key: pytest.StashKey[dict[str, Any]]
    key = take("pytest-metadata", "pytest_metadata.plugin", "metadata_key")
    return key


class _Rank:
    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self._sent: Any = to_plain(metadata)

    def pytest_accel_rank_data(self) -> dict[str, Any] | None:
        if self._metadata == self._sent:
            return None
        now: Any = to_plain(self._metadata)
        changed = {name: value for name, value in now.items() if name not in self._sent or self._sent[name] != value}
        self._sent = now
        return {KEY: changed} if changed else None


class _Driver:
    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata

    def pytest_accel_merge(self, rank_data: dict[int, dict[str, Any]]) -> None:
        self._metadata.update(by_name({rank: data[KEY] for rank, data in rank_data.items() if KEY in data}))
