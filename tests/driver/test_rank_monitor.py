"""Tests of the monitor of a world's ranks."""

from __future__ import annotations

import errno
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import pytest

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
