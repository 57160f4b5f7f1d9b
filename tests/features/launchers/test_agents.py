"""Tests of the agents of launched processes, and of their clients in the driver."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from json import JSONDecodeError
from pathlib import Path

import pytest
from msgspec import structs

from pytest_accel.core import fd_passing, prctl, unix_sockets
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.struct_messages import decode, encode
from pytest_accel.core.unix_sockets import Connection
from pytest_accel.features.launchers.agent import serve_driver
from pytest_accel.features.launchers.agent_client import AgentClient
from pytest_accel.features.launchers.agent_messages import End, Hello, ServerEnded, StartServer, ToDriver
from pytest_accel.features.launchers.transports import LocalAgentTransport, LocalClientTransport


def session(directory: str) -> SessionSpec:
    return SessionSpec((), "/", (), directory, "/", (), (), (), (), (), False)


def _connections() -> tuple[Connection, Connection]:
    """Return the ends of a new connection."""
    ours, theirs = unix_sockets.pair()
    return Connection(ours.detach()), Connection(theirs.detach())


@pytest.fixture
def keep_sigint() -> Iterator[None]:
    """Restore the handler of SIGINT after the test, since an agent replaces it."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("what", ["no message", "unknown server"])
def test_an_error_in_the_handling_of_a_message_is_reported(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    hello = Hello(1, 1, (), "/", "/", {}, "here", "here")
    with Connection(theirs.detach()) as other:
        client = AgentClient(hello, LocalClientTransport(Connection(ours.detach())), "here", lost.set, dict)
        spec = session("/")
        end, _ = pair = socket.socketpair()
        server = client.spawn(spec, end)
        if what == "no message":
            other.send_bytes(b"no message")
        else:
            other.send_bytes(encode(ServerEnded(7)))
        assert server.wait(60)
        assert lost.wait(60)
        assert client.lost
        for thread in [thread for thread in threading.enumerate() if thread.name == "accel-agent-1"]:
            thread.join(60)
        assert [one.exc_type for one in raised] == [JSONDecodeError if what == "no message" else IndexError]
        for one in pair:
            one.close()


@pytest.mark.skipif(prctl.end_of(1) is None, reason="the kernel has no pidfd")
def test_an_agent_exits_after_its_driver_with_the_status_that_it_was_sent(keep_sigint: None) -> None:
    ours, theirs = _connections()
    with ours, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as driver:
        ours.send_bytes(encode(End(3, driver.pid)))
        threading.Timer(0.5, driver.kill).start()
        assert serve_driver(LocalAgentTransport(theirs)) == 3
        assert driver.poll() is not None


def test_an_agent_fails_if_its_driver_is_lost(keep_sigint: None) -> None:
    ours, theirs = _connections()
    ours.close()
    assert serve_driver(LocalAgentTransport(theirs)) == 1


def test_the_end_of_each_fork_server_is_reported_in_any_order(tmp_path: Path, keep_sigint: None) -> None:
    ours, theirs = _connections()
    pairs = [socket.socketpair() for _ in range(2)]
    found: list[ServerEnded] = []

    def drive() -> None:
        runs = structs.replace(session(str(tmp_path / "runs")), sys_path=tuple(sys.path))
        exits = session(str(tmp_path / "exits"))  # The server cannot import anything.
        for number, (spec, (_, server_end)) in enumerate(zip((runs, exits), pairs, strict=True)):
            os.mkdir(spec.directory)
            ours.send_bytes(encode(StartServer(number, spec, {})))
            fd_passing.send(ours, [server_end.fileno()])
            server_end.close()
        found.append(decode(ours.recv_bytes(), ToDriver))
        pairs[0][0].close()  # Ends the first server.
        found.append(decode(ours.recv_bytes(), ToDriver))
        ours.send_bytes(encode(End(0, driver.pid)))

    with ours, subprocess.Popen([sys.executable, "-c", ""]) as driver:
        driving = threading.Thread(target=drive)
        driving.start()
        assert serve_driver(LocalAgentTransport(theirs)) == 0
        driving.join()
    pairs[1][0].close()
    assert [message.number for message in found] == [1, 0]


def test_the_driver_gets_the_error_of_a_fork_server_that_cannot_be_started(tmp_path: Path, keep_sigint: None) -> None:
    ours, theirs = _connections()
    driver_end, server_end = socket.socketpair()
    with ours, driver_end, server_end, subprocess.Popen([sys.executable, "-c", ""]) as driver:
        ours.send_bytes(encode(StartServer(5, session(str(tmp_path / "missing")), {})))
        fd_passing.send(ours, [server_end.fileno()])
        ours.send_bytes(encode(End(0, driver.pid)))
        assert serve_driver(LocalAgentTransport(theirs)) == 0
        message = decode(ours.recv_bytes(), ToDriver)
    assert isinstance(message, ServerEnded)
    assert message.number == 5
    assert "FileNotFoundError" in message.log
