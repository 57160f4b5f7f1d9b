"""Tests of `DriverConnection`, by which a rank receives requests and sends results."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pytest_accel.core import unix_sockets
from pytest_accel.core.rank_messages import NodeRef, Ready, Retire, RunTest
from pytest_accel.rank.driver_connection import DriverConnection


class ConnectedRank:
    """A rank and its driver."""

    def __init__(self, folder: Path) -> None:
        path = str(folder / "rank")
        self._listener = unix_sockets.listen(path, 1)
        self.driver = Connection(unix_sockets.connect(path).detach())
        self.rank = DriverConnection(self._listener)

    def close(self) -> None:
        self.rank.close()
        self.driver.close()
        self._listener.close()


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[ConnectedRank]:
    """Provide a rank that is connected to its driver."""
    made = ConnectedRank(tmp_path)
    yield made
    made.close()


def test_queued_messages_are_sent_with_the_next_one_in_order(connected: ConnectedRank) -> None:
    connected.rank.queue("setup")
    connected.rank.queue("call")
    assert not connected.driver.poll()
    connected.rank.send(Ready())
    assert connected.driver.recv() == ("setup", "call", Ready())
    connected.rank.send("next")
    assert connected.driver.recv() == ("next",)


def test_requests_are_received_in_order(connected: ConnectedRank) -> None:
    request = RunTest(1, NodeRef("test_x.py", ("test",)), ("test_x.py", 1, "test"), None)
    for message in (request, Retire()):
        connected.driver.send_bytes(pickle.dumps(message))
    assert connected.rank.receive() == request
    assert connected.rank.receive() == Retire()


def test_receive_fails_if_the_driver_has_closed_the_connection(connected: ConnectedRank) -> None:
    connected.driver.close()
    connected.rank.send("dropped")
    with pytest.raises((EOFError, OSError)):
        connected.rank.receive()
