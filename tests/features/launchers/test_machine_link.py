"""Tests of the connections between the driver and the agents of other machines."""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.core.session_folder import agent_path, rank_path
from pytest_accel.features.launchers.agent_messages import Hello, StartServer
from pytest_accel.features.launchers.machine_link import DriverLink, Target, call
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import RankTarget, call_agent
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import LENGTH
from tests.deadline import TIMEOUT, eventually
from tests.peers import forked_copy, read_all

KEY = b"a key that no other process has."


class Ends:
    """The ends of the driver, and of an agent whose ranks listen in `there`."""

    def __init__(self, here: Path, there: Path) -> None:
        self.there = there
        self.path = agent_path(str(here), 1)
        self.servers: list[socket.socket] = []
        """The fork servers' ends of their connections to the driver."""
        self.joined: queue.Queue[tuple[str, Hello]] = queue.Queue()
        self.ended = threading.Event()
        """Set once the agent has noticed the end of the connection."""
        self.driver = DriverLink(KEY, 0, lambda *call: self.joined.put(call))
        began = monotonic()
        self.link = call(["127.0.0.1"], self.driver.port, KEY, Hello(1, 2), "the driver", TIMEOUT)
        assert abs(self.link.clock) <= monotonic() - began
        self.link.serve(self._open, self._end)
        self.agent = threading.Thread(target=self.link.loop.run_forever)
        self.agent.start()
        name, greeting = self.joined.get(timeout=TIMEOUT)
        assert greeting == Hello(1, 2, address="127.0.0.1", driver_address="127.0.0.1")
        self.pool, end = socket.socketpair()
        spec = SessionSpec((), "", (), str(here), str(here / "tmp"), None, None, (), (), (), False, server=1)
        self.driver.listen(name, unix_sockets.listen(self.path, 8))
        self.driver.open(name, StartServer(spec), end)
        eventually("the server to start", lambda: bool(self.servers))

    def _open(self, target: Target) -> socket.socket:
        if isinstance(target, RankTarget):
            return unix_sockets.connect(rank_path(str(self.there), target.world, target.rank, "sock"))
        ours, end = socket.socketpair()
        self.servers.append(end)
        return ours

    def _end(self) -> None:
        self.ended.set()
        self.link.loop.stop()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    (tmp_path / "there").mkdir()
    made = Ends(tmp_path, tmp_path / "there")
    yield made
    made.driver.close()
    assert made.ended.wait(TIMEOUT)
    made.agent.join()
    made.link.close()
    for end in (made.pool, *made.servers):
        end.close()


@contextmanager
def rank(ends: Ends, number: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a driver's connection to a rank on the agent's machine, and the rank's end of it."""
    target = RankTarget(1, number, os.getpid())
    with (
        unix_sockets.listen(rank_path(str(ends.there), 1, number, "sock"), 1) as listener,
        call_agent(ends.path, target) as here,
        unix_sockets.accept(listener) as there,
    ):
        yield here, there


def test_streams_keep_their_order(ends: Ends) -> None:
    data = os.urandom(5_000_000)  # More than all buffers together hold.

    def send() -> None:
        ends.pool.sendall(data)
        ends.pool.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    assert read_all(ends.servers[0]) == data
    sender.join()
    assert read_all(ends.pool) == b""


def test_a_slow_reader_does_not_delay_other_streams(ends: Ends) -> None:
    with rank(ends, 0) as (slow, _), rank(ends, 1) as (fast, reader):
        slow.sendall(bytes(3_000_000))
        fast.sendall(b"at once")
        reader.settimeout(TIMEOUT)
        assert reader.recv(64) == b"at once"


def test_calls_are_routed_to_their_targets(ends: Ends) -> None:
    with rank(ends, 3) as (here, there), unix_sockets.connect(ends.path) as junk:
        with call_agent(ends.path, RankTarget(1, 4, 71)) as missing:
            assert read_all(missing) == b""
        junk.sendall(LENGTH.pack(-1))
        assert read_all(junk) == b""
        here.sendall(b"hello")
        there.settimeout(TIMEOUT)
        assert there.recv(64) == b"hello"
        there.sendall(b"welcome")
        there.close()
        assert read_all(here) == b"welcome"


def test_data_is_carried_although_its_sender_has_closed_the_connection_and_data_comes_for_it(ends: Ends) -> None:
    """So the pool retires a rank, which is ready at the same time."""
    waits, stopped = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        stopped.wait()

    with rank(ends, 0) as (here, there):
        ends.driver.loop.call_soon_threadsafe(wait)
        assert waits.wait(TIMEOUT)
        there.sendall(b"ready")
        assert select.select([ends.driver._descriptor], [], [], TIMEOUT)[0]  # Its loop finds the data when it goes on.
        here.sendall(b"end")
        here.close()
        stopped.set()
        there.settimeout(TIMEOUT)
        assert there.recv(64) == b"end"


def test_the_streams_of_the_driver_end_although_a_test_has_forked_its_process(ends: Ends) -> None:
    with forked_copy():
        ends.driver.close()
        assert read_all(ends.pool) == b""
