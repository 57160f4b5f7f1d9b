"""Tests of the client of a fork server: when it does periodic work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_accel.core import unix_sockets
from pytest_accel.forkserver import server_client
from pytest_accel.forkserver.server_client import ForkServerClient, ServerCallbacks
from pytest_accel.forkserver.server_messages import ServerNote
from tests.deadline import scaled
from tests.forkserver.fake_server import Calls, FakeServer, session

Start = Callable[[ServerCallbacks], ForkServerClient]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Yield a fork server, and close its connection."""
    server = FakeServer()
    yield server
    server.connection.close()


@pytest.fixture
def start(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Provide a function that starts a client of `server`, which has ticks in quick succession."""
    monkeypatch.setattr(server_client, "_TICK_INTERVAL", 0.01)
    tmp_path.chmod(0o700)
    return lambda callbacks: ForkServerClient(session(str(tmp_path)), callbacks, server.spawn)


def test_an_os_error_in_the_periodic_work_is_a_failure_and_not_the_end_of_the_server(start: Start) -> None:
    def fail() -> None:
        raise OSError("/proc cannot be read")

    calls = Calls()
    client = start(replace(calls.callbacks, on_tick=fail))
    assert calls.changed.wait(scaled(30))
    client.stop()
    [failure] = calls.failures
    assert "OSError: /proc cannot be read" in failure
    assert calls.ends == []


def test_periodic_work_is_done_while_messages_arrive_all_the_time(start: Start, server: FakeServer) -> None:
    ticked = threading.Event()

    def request_next(message: object) -> None:
        if not ticked.is_set():
            server.connection.send(message)

    client = start(replace(Calls().callbacks, on_message=request_next, on_tick=ticked.set))
    server.connection.send("message")
    assert ticked.wait(scaled(30))
    client.stop()


def test_a_server_that_does_not_read_is_killed(
    start: Start, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_sockets, "WRITE_TIMEOUT", 1)
    killed = threading.Event()
    monkeypatch.setattr(server, "kill", killed.set)
    client = start(Calls().callbacks)
    thread = threading.Thread(target=lambda: client.send(ServerNote("x" * 5_000_000)), daemon=True)
    thread.start()
    thread.join(scaled(20))
    try:
        assert killed.is_set(), "the write goes on"
        assert not thread.is_alive()
    finally:
        server.connection.close()
        thread.join(scaled(20))
    client.stop()


def test_a_server_that_cannot_be_killed_is_given_up(
    start: Start, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    waits: list[float | None] = []

    def wait(timeout: float | None) -> bool:
        waits.append(timeout)
        return False

    monkeypatch.setattr(server, "wait", wait)
    client = start(calls.callbacks)
    server.connection.close()
    assert calls.changed.wait(scaled(30))
    assert calls.ends == [0]
    assert client.stop() is False
    assert None not in waits
