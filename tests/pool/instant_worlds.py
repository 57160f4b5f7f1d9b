"""Worlds without processes, for tests of the pool."""

from __future__ import annotations

import pytest

from pytest_accel.pool.pool import Pool
from pytest_accel.pool.pooled_world import PooledWorld


def use_instant_worlds(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worlds of `pool` start at once, and be gone as soon as they are retired or killed."""
    manager = pool._manager

    def start(world: PooledWorld) -> None:
        world.started(tuple(range(1, world.spec.ranks + 1)))
        pool.on_started(world)

    monkeypatch.setattr(manager, "start", start)
    monkeypatch.setattr(manager, "_kill_after", lambda world, seconds: manager._forget(world))
