"""Tests of the driver's connection to a rank."""

from __future__ import annotations

import os
import tempfile
import threading

import pytest

from pytest_accel.core import unix_sockets
from pytest_accel.core.paths import socket_path
from pytest_accel.core.world_key import WorldKey
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.driver.rank_connection import RankConnection
from pytest_accel.pool.pool_messages import WorldGrant
from tests.deadline import scaled


def test_a_message_that_the_rank_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "WRITE_TIMEOUT", 1)
    sent: list[bool] = []
    with tempfile.TemporaryDirectory() as directory:  # `tmp_path` may be too long for the path of a socket.
        with unix_sockets.listen(socket_path(directory, 1, 0), 1):
            spec = WorldSpec(1, WorldKey("cpu", None, 1, grouped=True))
            rank = RankConnection.open(WorldGrant(spec, (os.getpid(),), directory, False, 0.0, ()), 0)
            thread = threading.Thread(target=lambda: sent.append(rank.send(b"x" * 5_000_000)), daemon=True)
            thread.start()
            thread.join(scaled(20))
        try:
            assert sent == [False], "the write goes on"
            assert rank.send(b"") is True  # The rank is dead now, which the monitor notices.
        finally:
            thread.join(scaled(20))
            rank.close()
