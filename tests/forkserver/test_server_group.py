"""Tests of a world that several fork servers start, and of what happens if one of them ends meanwhile."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_accel.core.rank_exit import exited
from pytest_accel.core.world_key import WorldKey
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.forkserver.server_client import ForkServerGroup
from pytest_accel.forkserver.server_messages import KillWorld, RankExited, ServerNote, StartWorld, WorldStarted
from tests.deadline import scaled
from tests.forkserver.fake_server import Calls, FakeServer, session

SPEC = WorldSpec(7, WorldKey("cpu", None, 2, grouped=True, devices_per_rank=0), servers=(0, 1), machines=(0, 1))
NOTE = ServerNote("the messages before this one have been handled")


class Group:
    """Two fork servers. The first one has received the message to start its rank of `SPEC`."""

    def __init__(self, directory: str) -> None:
        self.calls = Calls()
        self.servers = [FakeServer(), FakeServer()]
        self.lock = threading.RLock()
        self.group = ForkServerGroup(self.calls.callbacks, self.lock)
        with self.lock:
            self.group.run(session(directory), {number: server.spawn for number, server in enumerate(self.servers)})
            self.group.send(StartWorld(SPEC))

    def wait_for_call(self) -> None:
        """Wait for the next call of a callback."""
        assert self.calls.changed.wait(scaled(30))
        self.calls.changed.clear()

    def report_started(self) -> None:
        """Have the first server report its rank, and wait until the message has been handled."""
        self.servers[0].connection.send(WorldStarted(SPEC.world, (100,), 1234))
        self.servers[0].connection.send(NOTE)
        self.wait_for_call()
        assert self.calls.failures == []
        assert self.calls.messages == [NOTE]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """Yield the fork servers, and stop them."""
    tmp_path.chmod(0o700)
    group = Group(str(tmp_path))
    yield group
    group.group.stop()
    for server in group.servers:
        server.connection.close()


def test_a_world_does_not_need_a_server_that_has_ended(group: Group) -> None:
    group.servers[1].connection.close()
    group.wait_for_call()
    assert group.calls.ends == [1]
    group.report_started()
    with group.lock:
        group.group.send(KillWorld(SPEC.world))
    assert group.calls.messages[1:] == [RankExited(SPEC.world, 1, exited(-signal.SIGKILL))]


def test_a_world_that_starts_while_the_servers_are_stopped_is_ignored(group: Group) -> None:
    group.servers[1].on_kill_tree = group.report_started
    group.group.stop()
    assert group.calls.messages == [NOTE]
    assert group.calls.failures == []
