"""Tests of the connections between the driver and the agents of other machines, with an agent in a thread."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_accel.core.paths import agent_path, socket_path
from pytest_accel.features.launchers import agent_link
from pytest_accel.features.launchers.agent_link import AgentLink
from pytest_accel.features.launchers.agent_messages import Hello, KillServer, StartServer
from pytest_accel.features.launchers.driver_link import DriverLink, RemoteAgent
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import RankTarget, call_agent
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import LENGTH
from tests.peers import read_all

KEY = b"a key that no other process has."
HELLO = Hello(1, 71, ("-k", "\udcff"), "/", "/", {})


class Ends:
    """The driver, and an agent whose ranks listen in `there`."""

    def __init__(self, here: Path, there: Path) -> None:
        self.there = there
        self.spec = SessionSpec((), "", (), str(here), str(here / "tmp"), None, None, (), (), (), False, server=1)
        self.path = agent_path(str(here), 1)
        self.messages: list[object] = []
        """The messages that the agent has got, except for the first."""
        self.server: socket.socket | None = None
        """The fork server's end of its connection to the driver."""
        self.started, self.received, self.lost = threading.Event(), threading.Event(), threading.Event()
        self.driver = DriverLink(KEY, 0, print)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        agent = self.driver.joined.get(timeout=30)
        assert agent is not None
        self.agent: RemoteAgent = agent
        agent.meet(remote=True)
        agent.start(print, lambda why: self.lost.set())
        self.pool, end = socket.socketpair()
        with end:
            agent.start_server(StartServer(0, self.spec, {}), end)
        assert self.started.wait(30)

    def _serve(self) -> None:
        link = agent_link.call(["127.0.0.1"], self.driver.port, KEY, HELLO, 30, "rank 0")
        assert link is not None
        assert abs(link.clock) < 1
        self.why = link.run(lambda message: self._handle(link, message))
        link.close()

    def _handle(self, link: AgentLink, message: object) -> None:
        if isinstance(message, StartServer):
            assert os.path.exists(message.token)
            self.server = link.connect_server(str(self.there))
            self.started.set()
        else:
            self.messages.append(message)
            self.received.set()

    def close(self) -> None:
        self.driver.close()
        self.thread.join()
        assert self.why is None
        self.pool.close()
        assert self.server is not None
        self.server.close()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    (tmp_path / "there").mkdir()
    made = Ends(tmp_path, tmp_path / "there")
    yield made
    made.close()


@contextlib.contextmanager
def rank(ends: Ends, number: int, pid: int | None = None) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a driver's connection to a rank on the agent's machine, and the rank's end of it."""
    target = RankTarget(1, number, os.getpid() if pid is None else pid)
    with (
        unix_sockets.listen(socket_path(str(ends.there), 1, number), 1) as listener,
        call_agent(ends.path, target) as here,
        unix_sockets.accept(listener) as there,
    ):
        yield here, there


def test_messages_and_streams_keep_their_order(ends: Ends) -> None:
    data = os.urandom(5_000_000)  # More than all buffers together hold.

    def send() -> None:
        ends.pool.sendall(data)
        ends.pool.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    for number in range(3):
        ends.agent.send(KillServer(number))
    sender.start()
    assert ends.server is not None
    assert read_all(ends.server) == data
    sender.join()
    assert read_all(ends.pool) == b""
    assert ends.messages == [KillServer(number) for number in range(3)]


def test_a_slow_reader_does_not_delay_other_streams(ends: Ends) -> None:
    with rank(ends, 0) as (slow, _), rank(ends, 1) as (fast, reader):
        slow.sendall(bytes(3_000_000))
        fast.sendall(b"at once")
        reader.settimeout(30)
        assert reader.recv(64) == b"at once"
        ends.agent.send(KillServer(0))
        assert ends.received.wait(30)


def test_calls_are_routed_to_their_targets(ends: Ends) -> None:
    with rank(ends, 3) as (here, there), unix_sockets.connect(ends.path) as junk:
        with call_agent(ends.path, RankTarget(1, 4, 71)) as missing:
            assert read_all(missing) == b""
        junk.sendall(LENGTH.pack(-1))
        assert read_all(junk) == b""
        here.sendall(b"hello")
        there.settimeout(30)
        assert there.recv(64) == b"hello"
        there.sendall(b"welcome")
        there.close()
        assert read_all(here) == b"welcome"


def test_a_stream_ends_with_its_process_although_another_holds_the_socket(ends: Ends) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
        rank(ends, 0, process.pid) as (here, there),
    ):
        there.sendall(b"last word")
        process.kill()
        assert read_all(here) == b"last word"


@pytest.mark.parametrize("gone", ["agent", "driver"])
def test_an_end_is_noticed_at_the_other_end(tmp_path: Path, gone: str) -> None:
    """Also if a test has forked the driver's process, and the child lives on."""
    driver = DriverLink(KEY, 0, print)
    found: list[AgentLink | None] = []
    joining = threading.Thread(
        target=lambda: found.append(agent_link.call(["127.0.0.1"], driver.port, KEY, HELLO, 30, "rank 0"))
    )
    joining.start()
    agent = driver.joined.get(timeout=30)
    assert agent is not None
    agent.meet(remote=True)
    joining.join()
    (link,) = found
    assert link is not None
    lost = threading.Event()
    agent.start(print, lambda why: lost.set())
    if gone == "agent":
        link.close()
        assert lost.wait(30)
        driver.close()
        return
    until, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Newer Pythons warn of forks of processes that have threads.
        child = os.fork()
    if not child:
        os.close(write)
        os.read(until, 1)
        os._exit(0)
    driver.close()
    assert link.run(print) is None
    link.close()
    os.close(write)
    os.close(until)
    assert os.waitpid(child, 0)[1] == 0
