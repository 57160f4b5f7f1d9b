"""Tests of `DriverConnection`, by which a rank receives requests and sends results."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pytest_accel.core import unix_sockets
from pytest_accel.core.node_refs import NodePlace, NodeRef
from pytest_accel.core.rank_messages import Ready, Retire, RunCall, RunTest
from pytest_accel.rank.driver_connection import DriverConnection


class ConnectedRank:
    """A rank and its driver."""

    def __init__(self, folder: Path) -> None:
        path = str(folder / "rank")
        self._listener = unix_sockets.listen(path, 1)
        self.driver = Connection(unix_sockets.connect(path).detach())
        self.rank = DriverConnection(self._listener)

    def request(self, *messages: object) -> None:
        for message in messages:
            self.driver.send_bytes(pickle.dumps(message))

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


REQUEST = RunTest(
    1, NodeRef("test_x.py", "Module", (NodePlace("test"),)), ("test_x.py", 1, "test"), None, False, ("", "")
)


def test_messages_are_sent_together_in_order(connected: ConnectedRank) -> None:
    connected.rank.send("teardown", Ready())
    assert connected.driver.recv() == ("teardown", Ready())


def test_a_call_begins_when_the_driver_asks_for_it(connected: ConnectedRank) -> None:
    connected.request(RunCall(), REQUEST)
    connected.rank.wait_for_call()
    assert connected.rank.receive() == REQUEST


def test_the_request_for_a_call_is_ignored_after_a_test_that_had_none(connected: ConnectedRank) -> None:
    connected.request(REQUEST, RunCall(), Retire())
    assert connected.rank.receive() == REQUEST
    assert connected.rank.receive() == Retire()


def test_a_rank_without_a_driver_does_not_begin_a_call(connected: ConnectedRank) -> None:
    connected.driver.close()
    with pytest.raises(pytest.exit.Exception):
        connected.rank.wait_for_call()


def test_an_exception_of_a_signal_handler_is_returned_when_the_driver_asks_for_the_call(
    connected: ConnectedRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(number: int, frame: object) -> None:
        connected.request(RunCall())
        raise TimeoutError("of the suite")

    poll = connected.rank._connection.poll

    def interrupted(timeout: float | None = 0.0) -> bool:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGUSR1)
        return poll(timeout)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        monkeypatch.setattr(connected.rank._connection, "poll", interrupted)
        error = connected.rank.wait_for_call()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(error, TimeoutError)
    connected.request(REQUEST)
    assert connected.rank.receive() == REQUEST


def test_receive_fails_if_the_driver_has_closed_the_connection(connected: ConnectedRank) -> None:
    connected.driver.close()
    connected.rank.send("dropped")
    with pytest.raises((EOFError, OSError)):
        connected.rank.receive()
