"""Streams and messages over one TCP connection."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core import prctl, unix_sockets
from pytest_accel.core.connect import TARGET_LENGTH, call_agent
from pytest_accel.nodes.tcp_mux import StreamSocket, TcpMux
from tests.faults.conftest import eventually

KEY = b"of this connection alone"


class Far:
    """The target of a stream at the remote end."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.came = threading.Event()
        self.ends: dict[str, socket.socket] = {}
        """By name, the other end of each stream."""
        self.process: int | None = None

    def take(self, message: Any) -> None:
        self.messages.append(message)
        self.came.set()

    def open(self, name: object) -> StreamSocket:
        assert isinstance(name, str)
        if name.startswith("no"):
            raise FileNotFoundError(name)
        ours, self.ends[name] = socket.socketpair()
        return StreamSocket(ours, None if self.process is None else prctl.end_of(self.process))


@pytest.fixture
def far() -> Iterator[Far]:
    made = Far()
    yield made
    for end in made.ends.values():
        end.close()


def _nothing(name: object) -> StreamSocket:
    raise FileNotFoundError(name)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        call = socket.create_connection(listener.getsockname())
        return call, listener.accept()[0]


@pytest.fixture
def near(far: Far) -> Iterator[TcpMux]:
    """The near end of a bridge that works."""
    call, link = tcp_pair()
    made = TcpMux(call, key=KEY, first=0, open_stream=_nothing)
    other = TcpMux(link, key=KEY, first=1, open_stream=far.open)
    threads = [threading.Thread(target=made.run, args=(print,)), threading.Thread(target=other.run, args=(far.take,))]
    for thread in threads:
        thread.start()
    yield made
    made.end_after(0)
    for thread in threads:
        thread.join()


def all_of(end: socket.socket) -> bytes:
    """Return the bytes that arrive until the stream ends."""
    end.settimeout(30)
    found = b""
    with contextlib.suppress(ConnectionResetError):  # The other end has not read all that it was sent.
        while data := end.recv(1 << 16):
            found += data
    return found


def test_messages_and_streams_keep_their_order(near: TcpMux, far: Far) -> None:
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


def test_a_reader_that_is_slow_holds_up_no_other(near: TcpMux, far: Far) -> None:
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


def test_calls_are_led_to_their_targets(near: TcpMux, far: Far, tmp_path: Path) -> None:
    path = str(tmp_path / "calls")
    near.listen(path)
    with call_agent(path, "rank 3") as good, call_agent(path, "nobody") as bad, unix_sockets.connect(path) as junk:
        junk.sendall(TARGET_LENGTH.pack(2) + b"no pickle")
        good.sendall(b"hello")
        assert all_of(bad) == all_of(junk) == b""
        there = far.ends["rank 3"]
        there.settimeout(30)
        assert there.recv(64) == b"hello"
        there.sendall(b"welcome")
        there.close()
        assert all_of(good) == b"welcome"


def test_a_stream_ends_with_its_process_although_another_holds_the_socket(near: TcpMux, far: Far) -> None:
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
    bridge = TcpMux(call, key=KEY, first=0, open_stream=_nothing)
    ours, theirs = socket.socketpair()
    steps: list[Callable[[], object]] = [lambda: bridge.run(print), lambda: bridge.join(theirs, "stream")]
    for step in steps if late else reversed(steps):
        step()
    with ours:
        assert all_of(ours) == b""


class Deadly:
    """An object that leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


HEAD = struct.Struct("<BII")
MESSAGE = 4
TAG = 16


def forged(frames: list[bytes], mark: Path) -> bytes:
    """A frame of somebody who does not know the key."""
    data = pickle.dumps(Deadly(mark))
    return frames[0] + HEAD.pack(MESSAGE, 0, len(data)) + data + frames[0][-TAG:]


def changed(frames: list[bytes], mark: Path) -> bytes:
    """The frame that was sent, and in it something of the same length that was not."""
    data = pickle.dumps(Deadly(mark))
    data += bytes(len(frames[1]) - HEAD.size - TAG - len(data))
    return frames[0] + frames[1][: HEAD.size] + data + frames[1][-TAG:]


def replayed(frames: list[bytes], mark: Path) -> bytes:
    return frames[0] + frames[0]


def swapped(frames: list[bytes], mark: Path) -> bytes:
    return frames[1] + frames[0]


def left_out(frames: list[bytes], mark: Path) -> bytes:
    return frames[1]


def shortened(frames: list[bytes], mark: Path) -> bytes:
    """The second frame lacks a byte of its content."""
    kind, number, length = HEAD.unpack_from(frames[1])
    return frames[0] + HEAD.pack(kind, number, length - 1) + frames[1][HEAD.size : -TAG - 1] + frames[1][-TAG:]


def endless(frames: list[bytes], mark: Path) -> bytes:
    """A frame of which nobody would wait for the end."""
    return frames[0] + HEAD.pack(MESSAGE, 0, 0xFFFFFFFF)


def sent_back(frames: list[bytes], mark: Path) -> bytes:
    """None: it is the sender that gets its own frame."""
    return b""


def untouched(frames: list[bytes], mark: Path) -> bytes:
    return frames[0] + frames[1]


@pytest.mark.parametrize(
    ("interfere", "come"),
    [
        (untouched, 2),
        (forged, 1),
        (changed, 1),
        (replayed, 1),
        (swapped, 0),
        (left_out, 0),
        (shortened, 1),
        (endless, 1),
        (sent_back, 0),
    ],
)
def test_a_frame_that_was_not_sent_ends_the_connection(
    far: Far, tmp_path: Path, interfere: Callable[[list[bytes], Path], bytes], come: int
) -> None:
    mark = tmp_path / "mark"
    messages = ["first", {"second": "x" * 500}]
    near_end, near_way = tcp_pair()
    far_end, far_way = tcp_pair()
    reasons: dict[str, str | None] = {}
    sender = TcpMux(near_end, key=KEY, first=0, open_stream=_nothing)
    receiver = TcpMux(far_end, key=KEY, first=1, open_stream=far.open)
    threads = [
        threading.Thread(target=lambda: reasons.update(sender=sender.run(print))),
        threading.Thread(target=lambda: reasons.update(receiver=receiver.run(far.take))),
    ]
    for thread in threads:
        thread.start()
    with near_way, far_way:
        near_way.settimeout(30)
        frames = []
        for message in messages:
            sender.send(message)
            head = exactly(near_way, HEAD.size)
            frames.append(head + exactly(near_way, HEAD.unpack(head)[2] + TAG))
        far_way.sendall(interfere(frames, mark))
        far_way.shutdown(socket.SHUT_WR)
        if interfere is sent_back:
            near_way.sendall(frames[0])
        near_way.shutdown(socket.SHUT_WR)
        for thread in threads:
            thread.join()

    if interfere is untouched:
        assert reasons == {"sender": None, "receiver": None}
    else:
        reason = reasons["sender" if interfere is sent_back else "receiver"]
        assert reason is not None
        assert "a frame failed authentication" in reason
    assert far.messages == messages[:come]
    assert not mark.exists()


def exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += (piece := end.recv(size - len(data)))
        assert piece
    return data


def test_a_message_that_is_larger_than_a_frame_arrives_whole(near: TcpMux, far: Far) -> None:
    messages = [os.urandom(size) for size in (1 << 16, (1 << 16) - 100, 300_000, 1)]
    for message in messages:
        near.send(message)
    eventually("the messages", lambda: len(far.messages) == len(messages))
    assert far.messages == messages


@pytest.mark.parametrize("error", [IndexError("met in take"), EOFError("met in take"), OSError("met in take")])
def test_a_message_that_cannot_be_handled_ends_the_bridge_with_the_reason(far: Far, error: Exception) -> None:
    def take(message: object) -> None:
        raise error

    call, link = tcp_pair()
    bridge = TcpMux(call, key=KEY, first=0, open_stream=_nothing)
    other = TcpMux(link, key=KEY, first=1, open_stream=far.open)
    thread = threading.Thread(target=other.run, args=(print,))
    thread.start()
    other.send("a message")
    why = bridge.run(take)
    thread.join()
    assert why is not None
    assert why.startswith("an error at this end of the connection to it:\nTraceback")
    assert f"{type(error).__name__}: met in take" in why
