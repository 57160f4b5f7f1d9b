"""Tests of the driver's world with a fake monitor of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from pytest_accel.core.unix_sockets import Connection
from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.driver import world as world_module
from pytest_accel.driver.debugger_relay import DebuggerRelay
from pytest_accel.driver.rank_connection import RankConnection
from pytest_accel.driver.world import World
from pytest_accel.pool.pool_client import PoolClient
from pytest_accel.pool.pool_messages import WorldGrant


class FakeMonitor:
    """A fake monitor of two ranks. Each call of `pump` makes the next of the `events` happen."""

    def __init__(self) -> None:
        nothing = cast(Connection, None)
        self.ranks = [
            RankConnection(rank=rank, pid=0, is_remote=False, call=pytest.fail, connection=nothing, pidfd=None)
            for rank in range(2)
        ]
        self.ready: set[int] = set()
        self.events: list[Callable[[], None]] = []

    def pump(self, deadline: float) -> bool:
        if self.events:
            self.events.pop(0)()
            return True
        return False

    def is_ready(self, rank: int) -> None:
        self.ready.add(rank)

    def dies(self, rank: int) -> None:
        self.ranks[rank].end = RankOutcome(rank, "died")


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> FakeMonitor:
    """Provide the monitor of the `world`."""
    monitor = FakeMonitor()
    monkeypatch.setattr(world_module, "RankMonitor", lambda *arguments: monitor)
    return monitor


@pytest.fixture
def world(monitor: FakeMonitor) -> World:
    grant = SimpleNamespace(spec=SimpleNamespace(world=1, ranks=2), waited=0.0, warm=False)
    return World(cast(WorldGrant, grant), cast(PoolClient, None), cast(DebuggerRelay, None))


def test_a_rank_that_dies_once_it_is_ready_does_not_hide_that_another_one_is_not(
    world: World, monitor: FakeMonitor
) -> None:
    monitor.events = [lambda: monitor.is_ready(0), lambda: monitor.dies(0), lambda: monitor.is_ready(1)]
    outcomes = world.start()
    assert outcomes is not None
    assert [outcome.ending for outcome in outcomes] == ["died", "passed"]
    assert monitor.ready == {0, 1}


def test_a_world_is_not_alive_if_a_rank_has_died_after_its_test(world: World, monitor: FakeMonitor) -> None:
    assert world.alive
    monitor.events = [lambda: monitor.dies(1)]
    assert not world.alive
