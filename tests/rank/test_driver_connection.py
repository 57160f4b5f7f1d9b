"""Tests of `DriverConnection`, by which a rank receives requests and sends results."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pytest_accel.core import unix_sockets
from pytest_accel.core.rank_messages import Finished, NodeRef, Ready, Retire, RunTest
from pytest_accel.rank.driver_connection import DriverConnection
from pytest_accel.rank.run_ahead import PeerChannel, connect, sockets_of


def request(serial: int, *, ahead: bool = False) -> RunTest:
    """Return a request to run a test. `ahead`: it is sent while the previous test runs."""
    return RunTest(serial, NodeRef("test_x.py", ("test",)), ("test_x.py", 1, "test"), None, ahead=ahead)


class ConnectedRank:
    """Rank 0 of a world with two ranks, its driver, and the channel of rank 1."""

    def __init__(self, folder: Path) -> None:
        path = str(folder / "rank")
        self._listener = unix_sockets.listen(path, 1)
        self.driver = Connection(unix_sockets.connect(path).detach())
        self._pairs = connect(2)
        self.peer = PeerChannel(1, sockets_of(1, self._pairs))
        self.rank = DriverConnection(self._listener, PeerChannel(0, sockets_of(0, self._pairs)))

    def send(self, *messages: object) -> None:
        for message in messages:
            self.driver.send_bytes(pickle.dumps(message))

    def close(self) -> None:
        self.rank.close()
        self.driver.close()
        for end in (self._listener, *(end for pair in self._pairs for end in pair)):
            end.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ConnectedRank]:
    """Provide a world of two ranks and its driver."""
    made = ConnectedRank(tmp_path)
    yield made
    made.close()


def test_queued_messages_are_sent_with_the_next_one_in_order(world: ConnectedRank) -> None:
    world.rank.queue("setup")
    world.rank.queue("call")
    assert not world.driver.poll()
    world.rank.send(Ready())
    assert world.driver.recv() == ("setup", "call", Ready())
    world.rank.send("next")
    assert world.driver.recv() == ("next",)


def test_a_test_sent_ahead_begins_when_all_ranks_have_passed(world: ConnectedRank) -> None:
    world.rank.finish(1, Finished(1, {}, checksum=7))
    world.peer.announce(1, 7)
    world.send(request(2, ahead=True))
    assert world.rank.receive(announced=True) == request(2, ahead=True)


def test_a_test_sent_ahead_is_replaced_if_a_rank_has_not_passed(world: ConnectedRank) -> None:
    world.send(request(2, ahead=True), request(3))
    assert world.rank.receive(announced=False) == request(3)


def test_a_rank_waits_for_the_driver_if_checksums_differ(world: ConnectedRank) -> None:
    world.rank.finish(1, Finished(1, {}, checksum=7))
    world.peer.announce(1, 8)
    world.send(request(2, ahead=True), Retire())
    assert world.rank.receive(announced=True) == Retire()


def test_a_test_sent_ahead_begins_when_the_test_after_it_arrives(world: ConnectedRank) -> None:
    world.rank.finish(1, Finished(1, {}, checksum=7))
    world.send(request(2, ahead=True), request(3, ahead=True), request(4))
    assert world.rank.receive(announced=True) == request(2, ahead=True)
    assert world.rank.receive(announced=False) == request(4)


def test_receive_fails_if_the_driver_has_closed_the_connection(world: ConnectedRank) -> None:
    world.driver.close()
    world.rank.send("dropped")
    with pytest.raises((EOFError, OSError)):
        world.rank.receive(announced=False)
