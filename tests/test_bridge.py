"""Streams and messages over one TCP connection."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.worlds import linux
from pytest_accel.worlds.bridge import Bridge, Opened
from tests.worlds.conftest import eventually


class Far:
    """What the far end of a bridge leads to."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.came = threading.Event()
        self.ends: dict[str, socket.socket] = {}
        """By name, the other end of each stream."""
        self.process: int | None = None

    def take(self, message: Any) -> None:
        self.messages.append(message)
        self.came.set()

    def open(self, name: str) -> Opened:
        if name.startswith("no"):
            raise FileNotFoundError(name)
        ours, self.ends[name] = socket.socketpair()
        return Opened(ours, None if self.process is None else linux.end_of(self.process))


@pytest.fixture
def far() -> Iterator[Far]:
    made = Far()
    yield made
    for end in made.ends.values():
        end.close()


def _nothing(name: str) -> Opened:
    raise FileNotFoundError(name)


@pytest.fixture
def near(far: Far) -> Iterator[Bridge]:
    """The near end of a bridge that works."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        call = socket.create_connection(listener.getsockname())
        link, _ = listener.accept()
    made = Bridge(call, first=0, open_stream=_nothing, take=print)
    other = Bridge(link, first=1, open_stream=far.open, take=far.take)
    threads = [threading.Thread(target=each.run) for each in (made, other)]
    for thread in threads:
        thread.start()
    yield made
    made.expire(0)
    for thread in threads:
        thread.join()


def all_of(end: socket.socket) -> bytes:
    """What comes until the stream ends."""
    end.settimeout(30)
    found = b""
    with contextlib.suppress(ConnectionResetError):  # The other end has not read all that it was sent.
        while data := end.recv(1 << 16):
            found += data
    return found


def test_messages_and_streams_keep_their_order(near: Bridge, far: Far) -> None:
    ours, theirs = socket.socketpair()
    data = os.urandom(5_000_000)  # More than all buffers on the way hold.

    near.send({"first": 1})
    near.join(theirs, "stream")
    with ours:

        def send() -> None:
            ours.sendall(data)
            ours.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        eventually("the stream", lambda: "stream" in far.ends)
        assert all_of(far.ends["stream"]) == data
        sender.join()
        assert all_of(ours) == b""
    assert far.messages == [{"first": 1}]


def test_a_reader_that_is_slow_holds_up_no_other(near: Bridge, far: Far) -> None:
    slow, fast = socket.socketpair(), socket.socketpair()
    near.join(slow[1], "slow")
    near.join(fast[1], "fast")
    with slow[0], fast[0]:
        slow[0].sendall(bytes(3_000_000))
        fast[0].sendall(b"at once")
        near.send("message")
        assert far.came.wait(30)
        far.ends["fast"].settimeout(30)
        assert far.ends["fast"].recv(64) == b"at once"


def test_calls_are_led_to_what_their_first_line_names(near: Bridge, far: Far, tmp_path: Path) -> None:
    path = str(tmp_path / "calls")
    near.listen(path)
    with socket.socket(socket.AF_UNIX) as good, socket.socket(socket.AF_UNIX) as bad:
        for call, name in ((good, b"rank 3 1 77"), (bad, b"nobody")):
            call.connect(path)
            call.sendall(name + b"\nhello")
        assert all_of(bad) == b""
        there = far.ends["rank 3 1 77"]
        there.settimeout(30)
        assert there.recv(64) == b"hello"
        there.sendall(b"welcome")
        there.close()
        assert all_of(good) == b"welcome"


def test_a_stream_ends_with_its_process_although_another_holds_the_socket(near: Bridge, far: Far) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        far.process = process.pid
        ours, theirs = socket.socketpair()
        near.join(theirs, "stream")
        with ours:
            ours.sendall(b"question")
            eventually("the stream", lambda: "stream" in far.ends)
            far.ends["stream"].sendall(b"last word")
            process.kill()
            assert all_of(ours) == b"last word"


@pytest.mark.parametrize("late", [False, True])
def test_what_is_joined_to_a_bridge_that_is_down_ends(far: Far, late: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        call = socket.create_connection(listener.getsockname())
        listener.accept()[0].close()
    bridge = Bridge(call, first=0, open_stream=_nothing, take=print)
    ours, theirs = socket.socketpair()
    steps: list[Callable[[], object]] = [bridge.run, lambda: bridge.join(theirs, "stream")]
    for step in steps if late else reversed(steps):
        step()
    with ours:
        assert all_of(ours) == b""
