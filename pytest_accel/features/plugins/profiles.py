"""Converts profiles of `cProfile` to plain data and back."""

from __future__ import annotations

import pstats
from typing import Any


def to_data(stats: pstats.Stats) -> list[Any]:
    """Return `stats` as plain data: for each function its name, its numbers, and the numbers of each caller."""
    found: dict[Any, Any] = stats.stats  # type: ignore[attr-defined]
    return [(name, numbers, list(callers.items())) for name, (*numbers, callers) in found.items()]


def from_data(data: list[Any]) -> Any:
    """Return an object that `pstats.Stats` accepts as the profile that `to_data` has converted to `data`."""
    return _Profile(data)


class _Profile:
    """A finished profile, with the interface that `pstats.Stats` needs."""

    def __init__(self, data: list[Any]) -> None:
        self.stats = {tuple(name): (*numbers, dict(callers)) for name, numbers, callers in data}

    def create_stats(self) -> None:
        """Do nothing: `pstats.Stats` calls this to finish a profile, and this one is finished."""
