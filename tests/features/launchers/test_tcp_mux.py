"""Tests of `TcpMux`: many streams and messages over one TCP connection."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import msgpack

from pytest_accel.core import prctl
from pytest_accel.features.launchers.tcp_mux import StreamSocket, TcpMux
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import InspectorTarget, RankTarget, ServerTarget, call_agent
from pytest_accel.messages.struct_messages import LENGTH, encode
from tests.deadline import eventually
from tests.features.launchers.links import link_pair
from tests.peers import read_all

RANK = RankTarget(1, 3, 71)
RANK_NAME = encode(RANK).decode()


class RemoteEnd:
    """The remote end of a connection: it collects messages and opens streams."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.received = threading.Event()
        self.ends: dict[str, socket.socket] = {}
        """The test's end of each stream, by the name of the stream."""
        self.process: int | None = None

    def take(self, message: bytes) -> None:
        self.messages.append(message)
        self.received.set()

    def open(self, target: bytes) -> StreamSocket:
        name = target.decode()
        if "ServerTarget" in name:
            raise FileNotFoundError(name)
        if "InspectorTarget" in name:
            raise ValueError(name)
        ours, self.ends[name] = socket.socketpair()
        return StreamSocket(ours, None if self.process is None else prctl.end_of(self.process))


@pytest.fixture
def remote() -> Iterator[RemoteEnd]:
    """Yield the remote end of a connection."""
    made = RemoteEnd()
    yield made
    for end in made.ends.values():
        end.close()


def _refuse_stream(name: bytes) -> StreamSocket:
    raise FileNotFoundError(name)


def mux_pair(open_stream: Callable[[bytes], StreamSocket]) -> tuple[TcpMux, TcpMux]:
    """Return the local end of a connection, and the remote end, which opens streams."""
    here, there = link_pair()
    return (
        TcpMux(here, calls=False, open_stream=_refuse_stream),
        TcpMux(there, calls=True, open_stream=open_stream),
    )


@pytest.fixture
def mux(remote: RemoteEnd) -> Iterator[TcpMux]:
    """Yield the local end of a connection that works."""
    made, other = mux_pair(remote.open)
    threads = [
        threading.Thread(target=made.run, args=(print,)),
        threading.Thread(target=other.run, args=(remote.take,)),
    ]
    for thread in threads:
        thread.start()
    yield made
    made.end_after(0)
    for thread in threads:
        thread.join()


def test_messages_and_streams_keep_their_order(mux: TcpMux, remote: RemoteEnd) -> None:
    ours, theirs = socket.socketpair()
    data = os.urandom(5_000_000)  # More than all buffers together hold.

    messages = [os.urandom(size) for size in (1 << 16, (1 << 16) - 100, 300_000, 1)]  # Some are larger than a frame.
    for message in messages:
        mux.send(message)
    mux.join(theirs, b"stream")
    with ours:

        def send() -> None:
            ours.sendall(data)
            ours.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        eventually("the stream", lambda: "stream" in remote.ends)
        assert read_all(remote.ends["stream"]) == data
        sender.join()
        assert read_all(ours) == b""
    assert remote.messages == messages


def test_a_slow_reader_does_not_delay_other_streams(mux: TcpMux, remote: RemoteEnd) -> None:
    slow, fast = socket.socketpair(), socket.socketpair()
    mux.join(slow[1], b"slow")
    mux.join(fast[1], b"fast")
    with slow[0], fast[0]:
        slow[0].sendall(bytes(3_000_000))
        fast[0].sendall(b"at once")
        mux.send(b"message")
        assert remote.received.wait(30)
        remote.ends["fast"].settimeout(30)
        assert remote.ends["fast"].recv(64) == b"at once"


def test_calls_are_routed_to_their_targets(mux: TcpMux, remote: RemoteEnd, tmp_path: Path) -> None:
    path = str(tmp_path / "calls")
    mux.listen(path)
    with (
        call_agent(path, RANK) as good,
        call_agent(path, ServerTarget()) as missing,
        call_agent(path, InspectorTarget()) as malformed,
        unix_sockets.connect(path) as junk,
    ):
        junk.sendall(LENGTH.pack(-1))
        good.sendall(b"hello")
        assert read_all(missing) == read_all(malformed) == read_all(junk) == b""
        there = remote.ends[RANK_NAME]
        there.settimeout(30)
        assert there.recv(64) == b"hello"
        there.sendall(b"welcome")
        there.close()
        assert read_all(good) == b"welcome"


def test_a_stream_ends_with_its_process_although_another_holds_the_socket(mux: TcpMux, remote: RemoteEnd) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        remote.process = process.pid
        ours, theirs = socket.socketpair()
        mux.join(theirs, b"stream")
        with ours:
            ours.sendall(b"question")
            eventually("the stream", lambda: "stream" in remote.ends)
            remote.ends["stream"].sendall(b"last word")
            process.kill()
            assert read_all(ours) == b"last word"


def test_a_forged_frame_ends_the_connection(remote: RemoteEnd) -> None:
    link, other = link_pair()
    mux = TcpMux(link, calls=False, open_stream=remote.open)
    with other.socket:
        other.socket.sendall(other.frames.pack(msgpack.encode([3, b"genuine", True])))
        other.socket.sendall(b"\0\0\0\1x" + bytes(16))
        why = mux.run(remote.take)
    assert why is not None
    assert "a frame failed authentication" in why
    assert (mux.broken, remote.messages) == (True, [b"genuine"])
