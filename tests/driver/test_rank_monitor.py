"""Tests of the monitor of a world's ranks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from pickle import dumps
from typing import cast

import pytest

from pytest_accel.core import unix_sockets
from pytest_accel.core.clock import monotonic
from pytest_accel.core.rank_messages import NOTHING_ANNOUNCED, Announced, ExpectedEnd, PhaseReport
from pytest_accel.core.unix_sockets import Connection
from pytest_accel.core.world_key import WorldKey
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.driver.debugger_relay import DebuggerRelay
from pytest_accel.driver.rank_connection import RankConnection
from pytest_accel.driver.rank_monitor import RankMonitor
from pytest_accel.driver.world_condition import WorldCondition
from pytest_accel.pool.pool_client import PoolClient
from pytest_accel.pool.pool_messages import WorldGrant


def test_a_failed_connection_closes_those_to_the_other_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[int] = []

    def connect(grant: WorldGrant, rank: int) -> RankConnection:
        if rank == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        opened.extend(os.pipe())
        stream, pidfd = opened
        return RankConnection(
            rank=rank, pid=0, is_remote=False, call=pytest.fail, connection=Connection(stream), pidfd=pidfd
        )

    monkeypatch.setattr(RankConnection, "open", connect)
    grant = WorldGrant(WorldSpec(1, WorldKey("cpu", None, 2, grouped=True)), (0, 0), str(tmp_path), False, 0.0, ())
    with pytest.raises(OSError, match="Too many open files"):
        RankMonitor(grant, cast(PoolClient, None), WorldCondition(), cast(DebuggerRelay, None))
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_ends_are_announced_only_in_the_call_of_the_running_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver, sender = (Connection(end.detach()) for end in unix_sockets.pair())
    rank = RankConnection(rank=0, pid=0, is_remote=False, call=pytest.fail, connection=driver, pidfd=None)
    monkeypatch.setattr(RankConnection, "open", lambda grant, number: rank)
    grant = WorldGrant(WorldSpec(1, WorldKey("cpu", None, 1, grouped=True)), (0,), str(tmp_path), False, 0.0, ())
    monitor = RankMonitor(grant, cast(PoolClient, None), WorldCondition(), cast(DebuggerRelay, None))
    own = Announced(1, (ExpectedEnd(0, status=7),))

    def announced_after(message: object, announced: Announced = own) -> Announced:
        sender.send_bytes(dumps((message, announced)))
        assert monitor.pump(monotonic() + 60)
        return rank.announced

    monitor.serial = 1
    assert announced_after(Announced(2)) == NOTHING_ANNOUNCED
    assert announced_after(PhaseReport(1, "setup", {"outcome": "passed"}, 0.0)) == own
    assert announced_after(own, Announced(2)) == own
    assert announced_after(PhaseReport(1, "call", {"outcome": "passed"}, 0.0), Announced(1)) == own
    rank.begin()
    assert rank.announced == NOTHING_ANNOUNCED
    monitor.close()
    sender.close()
