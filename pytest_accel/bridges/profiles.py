"""Profiles of `cProfile` as plain data."""

from __future__ import annotations

import pstats
from typing import Any


def to_data(stats: pstats.Stats) -> list[Any]:
    """Return `stats` as plain data: for each function its name, its numbers, and its callers with theirs."""
    found: dict[Any, Any] = stats.stats  # type: ignore[attr-defined]
    return [(name, numbers, list(callers.items())) for name, (*numbers, callers) in found.items()]


def from_data(data: list[Any]) -> Any:
    """Return an object from which `pstats.Stats` makes the profile that `to_data` has turned into `data`."""
    return _Profile(data)


class _Profile:
    """A profile that has ended, as `pstats.Stats` asks for it."""

    def __init__(self, data: list[Any]) -> None:
        self.stats = {tuple(name): (*numbers, dict(callers)) for name, numbers, callers in data}

    def create_stats(self) -> None:
        """Do nothing: `pstats.Stats` calls this to end a profile, and this one has ended."""
