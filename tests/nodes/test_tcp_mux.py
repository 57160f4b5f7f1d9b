"""Tests of `TcpMux`: many streams and messages over one TCP connection."""

from __future__ import annotations

import os
import pickle
import select
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
from pytest_accel.features.launchers.tcp_mux import StreamSocket, TcpMux
from tests.deadline import eventually
from tests.peers import UnpickleMarker, read_all

KEY = b"of this connection alone"


class RemoteEnd:
    """The remote end of a connection: it collects messages and opens streams."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.received = threading.Event()
        self.ends: dict[str, socket.socket] = {}
        """The test's end of each stream, by the name of the stream."""
        self.process: int | None = None

    def take(self, message: Any) -> None:
        self.messages.append(message)
        self.received.set()

    def open(self, name: object) -> StreamSocket:
        assert isinstance(name, str)
        if name.startswith("no"):
            raise FileNotFoundError(name)
        ours, self.ends[name] = socket.socketpair()
        return StreamSocket(ours, None if self.process is None else prctl.end_of(self.process))


@pytest.fixture
def remote() -> Iterator[RemoteEnd]:
    """Yield the remote end of a connection."""
    made = RemoteEnd()
    yield made
    for end in made.ends.values():
        end.close()


def _refuse_stream(name: object) -> StreamSocket:
    raise FileNotFoundError(name)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        call = socket.create_connection(listener.getsockname())
        return call, listener.accept()[0]


@pytest.fixture
def mux(remote: RemoteEnd) -> Iterator[TcpMux]:
    """Yield the local end of a connection that works."""
    call, link = tcp_pair()
    made = TcpMux(call, key=KEY, first=0, open_stream=_refuse_stream)
    other = TcpMux(link, key=KEY, first=1, open_stream=remote.open)
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


def wait_for_posted_calls(mux: TcpMux) -> None:
    """Wait until the thread of `mux` has executed the methods that were called before."""
    done = threading.Event()
    read_end, write_end = os.pipe()
    os.close(write_end)
    mux.watch(read_end, done.set)
    assert done.wait(60)


def test_messages_and_streams_keep_their_order(mux: TcpMux, remote: RemoteEnd) -> None:
    ours, theirs = socket.socketpair()
    data = os.urandom(5_000_000)  # More than all buffers together hold.

    mux.send({"first": 1})
    mux.join(theirs, "stream")
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
    assert remote.messages == [{"first": 1}]


def test_flush_waits_until_all_messages_are_written() -> None:
    call, link = tcp_pair()
    mux = TcpMux(call, key=KEY, first=0, open_stream=_refuse_stream)
    running = threading.Thread(target=mux.run, args=(print,))
    running.start()
    size = 30_000_000
    mux.send(bytes(size))  # More than all buffers together hold.
    wait_for_posted_calls(mux)
    flushing = threading.Thread(target=mux.flush, args=(120,))
    flushing.start()
    wait_for_posted_calls(mux)
    with link:
        assert flushing.is_alive()
        received = 0
        while received < size:
            received += len(link.recv(1 << 20))
        flushing.join(60)
        assert not flushing.is_alive()
    running.join()


def test_flush_ends_with_the_connection() -> None:
    call, link = tcp_pair()
    mux = TcpMux(call, key=KEY, first=0, open_stream=_refuse_stream)
    running = threading.Thread(target=mux.run, args=(print,))
    running.start()
    mux.send(bytes(30_000_000))  # More than all buffers together hold.
    flushing = threading.Thread(target=mux.flush, args=(120,))
    flushing.start()
    wait_for_posted_calls(mux)
    link.close()
    running.join()
    flushing.join(60)
    assert not flushing.is_alive()


def test_a_slow_reader_does_not_delay_other_streams(mux: TcpMux, remote: RemoteEnd) -> None:
    slow, fast = socket.socketpair(), socket.socketpair()
    mux.join(slow[1], "slow")
    mux.join(fast[1], "fast")
    with slow[0], fast[0]:
        slow[0].sendall(bytes(3_000_000))
        fast[0].sendall(b"at once")
        mux.send("message")
        assert remote.received.wait(30)
        remote.ends["fast"].settimeout(30)
        assert remote.ends["fast"].recv(64) == b"at once"


def test_calls_are_routed_to_their_targets(mux: TcpMux, remote: RemoteEnd, tmp_path: Path) -> None:
    path = str(tmp_path / "calls")
    mux.listen(path)
    with call_agent(path, "rank 3") as good, call_agent(path, "nobody") as bad, unix_sockets.connect(path) as junk:
        junk.sendall(TARGET_LENGTH.pack(2) + b"no pickle")
        good.sendall(b"hello")
        assert read_all(bad) == read_all(junk) == b""
        there = remote.ends["rank 3"]
        there.settimeout(30)
        assert there.recv(64) == b"hello"
        there.sendall(b"welcome")
        there.close()
        assert read_all(good) == b"welcome"


def test_a_socket_is_closed_when_another_one_listens_at_its_path(
    mux: TcpMux, remote: RemoteEnd, tmp_path: Path
) -> None:
    path, old = str(tmp_path / "calls"), str(tmp_path / "old")
    mux.listen(path)
    os.link(path, old)
    unix_sockets.connect(old).close()
    mux.listen(path)
    wait_for_posted_calls(mux)
    with pytest.raises(ConnectionRefusedError):
        unix_sockets.connect(old)
    with call_agent(path, "rank 3") as call:
        call.sendall(b"hello")
        eventually("the stream", lambda: "rank 3" in remote.ends)
        remote.ends["rank 3"].settimeout(30)
        assert remote.ends["rank 3"].recv(64) == b"hello"


def test_a_stream_ends_with_its_process_although_another_holds_the_socket(mux: TcpMux, remote: RemoteEnd) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        remote.process = process.pid
        ours, theirs = socket.socketpair()
        mux.join(theirs, "stream")
        with ours:
            ours.sendall(b"question")
            eventually("the stream", lambda: "stream" in remote.ends)
            remote.ends["stream"].sendall(b"last word")
            process.kill()
            assert read_all(ours) == b"last word"


def test_a_stream_may_get_the_descriptors_of_one_that_has_just_ended() -> None:
    call, link = tcp_pair()
    first, second = socket.socketpair(), socket.socketpair()
    first_end, second_end = os.pipe(), os.pipe()

    def open_stream(name: object) -> StreamSocket:
        if name == "first":
            return StreamSocket(first[0], first_end[0])
        os.dup2(second_end[0], first_end[0])
        return StreamSocket(second[0], first_end[0])

    local = TcpMux(call, key=KEY, first=0, open_stream=_refuse_stream)
    other = TcpMux(link, key=KEY, first=1, open_stream=open_stream)
    reasons: list[str | None] = []
    threads = [
        threading.Thread(target=local.run, args=(print,)),
        threading.Thread(target=lambda: reasons.append(other.run(print))),
    ]
    for thread in threads:
        thread.start()
    ours, theirs = socket.socketpair()
    with first[1], second[1], ours:
        second[1].settimeout(30)
        local.join(theirs, "first")
        ours.sendall(b"x")
        assert read_exactly(first[1], 1) == b"x"

        # While the thread is blocked, the first stream ends, the second is opened, and the first's process ends.
        blocked, go_on = threading.Event(), threading.Event()
        wake_read, wake_write = os.pipe()
        os.close(wake_write)

        def block() -> None:
            blocked.set()
            go_on.wait(60)

        other.watch(wake_read, block)
        assert blocked.wait(60)
        first[1].close()
        new, theirs = socket.socketpair()
        local.join(theirs, "second")
        assert select.select([link], [], [], 60)[0]
        os.close(first_end[1])
        go_on.set()

        with new:
            assert read_all(ours) == b""
            new.sendall(b"y")
            assert read_exactly(second[1], 1) == b"y"
    local.end_after(0)
    for thread in threads:
        thread.join()
    for descriptor in second_end:
        os.close(descriptor)
    assert reasons == [None]


@pytest.mark.parametrize("joins_late", [False, True])
def test_a_stream_that_joins_a_closed_connection_ends(remote: RemoteEnd, joins_late: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        call = socket.create_connection(listener.getsockname())
        listener.accept()[0].close()
    local = TcpMux(call, key=KEY, first=0, open_stream=_refuse_stream)
    ours, theirs = socket.socketpair()
    steps: list[Callable[[], object]] = [lambda: local.run(print), lambda: local.join(theirs, "stream")]
    for step in steps if joins_late else reversed(steps):
        step()
    with ours:
        assert read_all(ours) == b""


HEAD = struct.Struct("<BII")
MESSAGE = 4
TAG = 16


def forged(frames: list[bytes], marker: Path) -> bytes:
    """Insert a frame that was made without the key."""
    data = pickle.dumps(UnpickleMarker(marker))
    return frames[0] + HEAD.pack(MESSAGE, 0, len(data)) + data + frames[0][-TAG:]


def altered(frames: list[bytes], marker: Path) -> bytes:
    """Replace the content of the second frame by other content of the same length."""
    data = pickle.dumps(UnpickleMarker(marker))
    data += bytes(len(frames[1]) - HEAD.size - TAG - len(data))
    return frames[0] + frames[1][: HEAD.size] + data + frames[1][-TAG:]


def replayed(frames: list[bytes], marker: Path) -> bytes:
    return frames[0] + frames[0]


def swapped(frames: list[bytes], marker: Path) -> bytes:
    return frames[1] + frames[0]


def left_out(frames: list[bytes], marker: Path) -> bytes:
    return frames[1]


def shortened(frames: list[bytes], marker: Path) -> bytes:
    """Remove a byte from the content of the second frame."""
    kind, number, length = HEAD.unpack_from(frames[1])
    return frames[0] + HEAD.pack(kind, number, length - 1) + frames[1][HEAD.size : -TAG - 1] + frames[1][-TAG:]


def too_long(frames: list[bytes], marker: Path) -> bytes:
    """Insert the head of a frame with the largest length."""
    return frames[0] + HEAD.pack(MESSAGE, 0, 0xFFFFFFFF)


def sent_back(frames: list[bytes], marker: Path) -> bytes:
    """Send the receiver nothing. The test sends the sender its own frame."""
    return b""


def untouched(frames: list[bytes], marker: Path) -> bytes:
    return frames[0] + frames[1]


@pytest.mark.parametrize(
    ("tamper", "arriving"),
    [
        (untouched, 2),
        (forged, 1),
        (altered, 1),
        (replayed, 1),
        (swapped, 0),
        (left_out, 0),
        (shortened, 1),
        (too_long, 1),
        (sent_back, 0),
    ],
)
def test_a_manipulated_frame_ends_the_connection(
    remote: RemoteEnd, tmp_path: Path, tamper: Callable[[list[bytes], Path], bytes], arriving: int
) -> None:
    marker = tmp_path / "marker"
    messages = ["first", {"second": "x" * 500}]
    sender_end, from_sender = tcp_pair()
    receiver_end, to_receiver = tcp_pair()
    reasons: dict[str, str | None] = {}
    sender = TcpMux(sender_end, key=KEY, first=0, open_stream=_refuse_stream)
    receiver = TcpMux(receiver_end, key=KEY, first=1, open_stream=remote.open)
    threads = [
        threading.Thread(target=lambda: reasons.update(sender=sender.run(print))),
        threading.Thread(target=lambda: reasons.update(receiver=receiver.run(remote.take))),
    ]
    for thread in threads:
        thread.start()
    with from_sender, to_receiver:
        from_sender.settimeout(30)
        frames = []
        for message in messages:
            sender.send(message)
            head = read_exactly(from_sender, HEAD.size)
            frames.append(head + read_exactly(from_sender, HEAD.unpack(head)[2] + TAG))
        to_receiver.sendall(tamper(frames, marker))
        to_receiver.shutdown(socket.SHUT_WR)
        if tamper is sent_back:
            from_sender.sendall(frames[0])
        from_sender.shutdown(socket.SHUT_WR)
        for thread in threads:
            thread.join()

    if tamper is untouched:
        assert reasons == {"sender": None, "receiver": None}
    else:
        reason = reasons["sender" if tamper is sent_back else "receiver"]
        assert reason is not None
        assert "a frame failed authentication" in reason
    assert remote.messages == messages[:arriving]
    assert not marker.exists()


def read_exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += (piece := end.recv(size - len(data)))
        assert piece
    return data


def test_a_message_that_is_larger_than_a_frame_arrives_whole(mux: TcpMux, remote: RemoteEnd) -> None:
    messages = [os.urandom(size) for size in (1 << 16, (1 << 16) - 100, 300_000, 1)]
    for message in messages:
        mux.send(message)
    eventually("the messages", lambda: len(remote.messages) == len(messages))
    assert remote.messages == messages


@pytest.mark.parametrize("error", [IndexError("met in take"), EOFError("met in take"), OSError("met in take")])
def test_an_error_in_a_message_handler_ends_the_connection(remote: RemoteEnd, error: Exception) -> None:
    def take(message: object) -> None:
        raise error

    call, link = tcp_pair()
    local = TcpMux(call, key=KEY, first=0, open_stream=_refuse_stream)
    other = TcpMux(link, key=KEY, first=1, open_stream=remote.open)
    thread = threading.Thread(target=other.run, args=(print,))
    thread.start()
    other.send("a message")
    why = local.run(take)
    thread.join()
    assert why is not None
    assert why.startswith("an error at this end of the connection to it:\nTraceback")
    assert f"{type(error).__name__}: met in take" in why
