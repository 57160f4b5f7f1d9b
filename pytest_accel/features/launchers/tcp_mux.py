"""A multiplexer: many byte streams, and messages, over one TCP connection between two machines.

A stream is a connected socket at each end; the multiplexer carries its bytes. Its buffer for a slow reader is not
bounded, since one stream must not block the others; senders truncate everything that they send to a driver.

Each frame has an authentication code, which is checked before the frame is used. A wrong code ends the connection.

The kernel detects that the other machine is unreachable (tcp(7): SO_KEEPALIVE, TCP_USER_TIMEOUT). So a process that
holds the GIL for a minute does not count as lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from msgspec import Struct, msgpack

from pytest_accel.core.clock import monotonic
from pytest_accel.features.launchers.authentication import ForgedFrame
from pytest_accel.features.launchers.greeting import AuthenticatedLink
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.struct_messages import LENGTH

SILENCE = 10.0
"""Seconds after which a machine that does not answer counts as lost."""
_PROBE = 2
"""Seconds between two keepalive probes to a silent machine."""
_CHUNK = 1 << 16
"""Maximum number of bytes of a stream or a message in one frame."""
_LONGEST_FRAME = _CHUNK + 64
"""Maximum number of bytes in a frame, which has a few more than its chunk."""


# The contents of frames, in MessagePack, which can carry the bytes of streams as they are.


class _Open(Struct, frozen=True, tag=0, array_like=True):
    """Open a stream."""

    stream: int
    target: bytes


class _Data(Struct, frozen=True, tag=1, array_like=True):
    """Bytes of a stream."""

    stream: int
    data: bytes


class _Close(Struct, frozen=True, tag=2, array_like=True):
    """The end of a stream."""

    stream: int


class _Part(Struct, frozen=True, tag=3, array_like=True):
    """A part of a message."""

    data: bytes
    last: bool


_Content = _Open | _Data | _Close | _Part
_decode: Callable[[bytes], _Content] = msgpack.Decoder(_Content).decode


class StreamSocket(NamedTuple):
    """A socket that a stream is connected to."""

    socket: socket.socket
    end: int | None = None
    """A descriptor that becomes readable when the process at the other end of the socket ends."""


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream at this end of the connection."""

    number: int
    socket: socket.socket
    end: int | None
    out: bytearray = field(default_factory=bytearray)
    """Data from the other end that has not been written to `socket` yet."""
    closing: bool = False
    """True if the stream ends once `out` is empty."""


class TcpMux:
    """One end of the connection. :meth:`run` does the work in one thread; other methods may be called in any thread."""

    def __init__(
        self,
        link: AuthenticatedLink,
        *,
        calls: bool,
        open_stream: Callable[[bytes], StreamSocket],
    ) -> None:
        """`calls` is True at the end that has called the other.

        `open_stream` returns the socket for a stream that the other end opens to a target; it raises OSError or
        ValueError if there is no such target.
        """
        self.broken = False
        """True if the connection ended because a frame failed authentication, or because of an error at this end."""
        self._link = link.socket
        self._frames = link.frames
        self._frames.longest = _LONGEST_FRAME
        self._parts = bytearray()
        """The parts received so far of an incomplete message."""
        self._open_stream = open_stream
        self._handle: Callable[[bytes], None] | None = None
        self._numbers = count(int(calls), 2)
        self._streams: dict[int, _Stream] = {}
        self._listeners: dict[str, socket.socket] = {}
        """The listening sockets, by path."""
        self._callers: set[socket.socket] = set()
        """Accepted connections that have not sent their target yet."""
        self._in = bytearray()
        """Received data that is not a complete frame yet."""
        self._out = bytearray()
        """Data that has not been written to the connection yet."""
        self._flushed: list[threading.Event] = []
        """Events of :meth:`flush`, to be set once `_out` is empty."""
        self._deadline: float | None = None
        self._posted: deque[Callable[[], object]] = deque()
        """Functions to call in the thread of `run`."""
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._lock = threading.Lock()
        self._over = False
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._link.setblocking(False)
        set_keepalive(self._link)
        self._selector.register(self._link, selectors.EVENT_READ, self._on_link)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)

    def send(self, message: bytes) -> None:
        """Send `message` to the other end; no-op if the connection has ended."""
        self._post(partial(self._put_message, message))

    def join(self, end: socket.socket, target: bytes) -> None:
        """Open a stream from `end` to `target` at the other end. This object closes `end`."""
        if not self._post(partial(self._join, end, target)):
            end.close()

    def listen(self, path: str) -> None:
        """Open a stream for each connection to the socket at `path`, to the target that it names (`call_agent`).

        The socket replaces an earlier one at `path`.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = unix_sockets.listen(path, 64)
        listener.setblocking(False)
        if not self._post(partial(self._listen, path, listener)):
            listener.close()

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Close `descriptor` and call `call`, in the thread of :meth:`run`, once `descriptor` becomes readable."""

        def on_ready(mask: int) -> None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            call()

        self._post(lambda: self._selector.register(descriptor, selectors.EVENT_READ, on_ready))

    def flush(self, timeout: float) -> None:
        """Wait until earlier messages are written or the connection has ended, but at most `timeout` seconds."""
        flushed = threading.Event()
        if self._post(partial(self._notify_flushed, flushed)):
            flushed.wait(timeout)

    def end_after(self, seconds: float) -> None:
        """Have :meth:`run` return after `seconds`, if the connection has not ended before."""
        self._deadline = monotonic() + seconds
        self._post(lambda: None)

    def run(self, handle: Callable[[bytes], None]) -> str | None:
        """Carry data until the connection ends, and call `handle` with each message.

        Return the reason for the end, or None if the process at the other end has closed the connection or has ended.
        The reason may be an error at this end, with its traceback: other threads depend on this one, so it must not end
        without a report.
        """
        self._handle = handle
        try:
            while self._deadline is None or monotonic() < self._deadline:
                left = None if self._deadline is None else max(0.0, self._deadline - monotonic())
                for key, mask in self._selector.select(left):
                    current = self._selector.get_map().get(key.fd)
                    # If it is not the same, a handler that ran earlier in this loop has closed it.
                    if current is not None and current.fileobj is key.fileobj:
                        key.data(mask)
            return None
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return None
        except ForgedFrame as error:
            self.broken = True
            return str(error)
        except OSError as error:
            if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN):
                return f"it did not answer for {SILENCE:g} s"
            return str(error)
        except Exception:
            self.broken = True
            return f"an error at this end of the connection to it:\n{traceback.format_exc()}"
        finally:
            self._end()

    def close_in_child(self) -> None:
        """Close this copy of the connection in a process that was forked from this one."""
        self._link.close()

    def _post(self, call: Callable[[], object]) -> bool:
        """Have `call` called in the thread of :meth:`run`; return False if the connection has ended."""
        with self._lock:
            if self._over:
                return False
            self._posted.append(call)
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"w")
            return True

    # In the thread of `run`

    def _on_wake(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._posted:
            self._posted.popleft()()

    def _end(self) -> None:
        """Close everything that this end has open."""
        with self._lock:
            self._over = True
        for call in self._posted:
            for argument in call.args if isinstance(call, partial) else ():
                if isinstance(argument, socket.socket):
                    argument.close()
                elif isinstance(argument, threading.Event):
                    self._flushed.append(argument)
        for flushed in self._flushed:
            flushed.set()
        for stream in list(self._streams.values()):
            self._drop(stream)
        for held in (*self._listeners.values(), *self._callers):
            held.close()
        self._selector.close()
        self._link.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _on_link(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush_link()
        if mask & selectors.EVENT_READ:
            with contextlib.suppress(BlockingIOError):
                data = self._link.recv(_CHUNK)
                if not data:
                    raise EOFError
                self._in += data
                self._take_frames()

    def _take_frames(self) -> None:
        """Handle the complete frames received so far; raise :class:`ForgedFrame` if an authentication code is wrong."""
        at = 0
        while not self._frames.missing(self._in, at):
            data, at = self._frames.take(self._in, at)
            self._handle_content(_decode(data))
        del self._in[:at]

    def _handle_content(self, content: _Content) -> None:
        match content:
            case _Part(data, last):
                self._parts += data
                if last:
                    message, self._parts = bytes(self._parts), bytearray()
                    assert self._handle is not None
                    try:
                        self._handle(message)
                    except (EOFError, OSError) as error:  # `run` would take these for errors of the connection.
                        raise RuntimeError("a message could not be handled") from error
            case _Open(number, target):
                try:
                    opened = self._open_stream(target)
                except (OSError, ValueError):
                    self._put(_Close(number))
                else:
                    self._add(number, opened)
            case _Data(number, data) if number in self._streams:  # If not, it has been closed at this end.
                stream = self._streams[number]
                stream.out += data
                self._flush(stream)
            case _Close(number) if number in self._streams:
                stream = self._streams[number]
                stream.closing = True
                self._flush(stream)

    def _put_message(self, data: bytes) -> None:
        for at in range(0, len(data), _CHUNK):
            self._put(_Part(data[at : at + _CHUNK], at + _CHUNK >= len(data)))

    def _put(self, content: _Content) -> None:
        self._out += self._frames.pack(msgpack.encode(content))
        self._flush_link()

    def _notify_flushed(self, flushed: threading.Event) -> None:
        self._flushed.append(flushed)
        self._flush_link()

    def _flush_link(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._out:
                del self._out[: self._link.send(self._out)]
            for flushed in self._flushed:
                flushed.set()
            self._flushed.clear()
        self._selector.modify(self._link, _events(self._out), self._on_link)

    def _join(self, end: socket.socket, target: bytes) -> None:
        number = next(self._numbers)
        self._put(_Open(number, target))
        self._add(number, StreamSocket(end))

    def _add(self, number: int, opened: StreamSocket) -> None:
        stream = self._streams[number] = _Stream(number, *opened)
        stream.socket.setblocking(False)
        self._selector.register(stream.socket, selectors.EVENT_READ, partial(self._on_stream, stream))
        if stream.end is not None:
            self._selector.register(stream.end, selectors.EVENT_READ, partial(self._on_end, stream))

    def _on_stream(self, stream: _Stream, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(stream)
        if mask & selectors.EVENT_READ and stream.number in self._streams:
            self._forward(stream)

    def _forward(self, stream: _Stream) -> bool:
        """Forward a piece of the data that `stream` has received; return False if there was none."""
        try:
            data = stream.socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._put(_Data(stream.number, data))
        else:
            self._put(_Close(stream.number))
            self._drop(stream)
        return bool(data)

    def _on_end(self, stream: _Stream, mask: int) -> None:
        """Forward the remaining data and close the stream, since its process has ended.

        A child of the process may still hold the socket open, so there may be no end of file. No-op if the stream was
        closed after the event was reported: a new stream may have got its descriptors.
        """
        if stream.number not in self._streams:
            return
        while self._forward(stream):
            pass
        if stream.number in self._streams:
            self._put(_Close(stream.number))
            self._drop(stream)

    def _flush(self, stream: _Stream) -> None:
        """Write the data for `stream` to its socket as far as possible; close the stream if it is complete."""
        try:
            while stream.out:
                del stream.out[: stream.socket.send(stream.out)]
        except BlockingIOError:
            pass
        except OSError:  # The reader has closed the socket. Keep the stream: data from it may still arrive.
            stream.out.clear()
        if stream.closing and not stream.out:
            self._drop(stream)
        else:
            self._selector.modify(stream.socket, _events(stream.out), partial(self._on_stream, stream))

    def _drop(self, stream: _Stream) -> None:
        """Close `stream` at this end."""
        del self._streams[stream.number]
        self._selector.unregister(stream.socket)
        stream.socket.close()
        if stream.end is not None:
            self._selector.unregister(stream.end)
            os.close(stream.end)

    def _listen(self, path: str, listener: socket.socket) -> None:
        if path in self._listeners:
            self._selector.unregister(self._listeners[path])
            self._listeners[path].close()
        self._listeners[path] = listener
        self._selector.register(listener, selectors.EVENT_READ, partial(self._on_call, listener))

    def _on_call(self, listener: socket.socket, mask: int) -> None:
        with contextlib.suppress(OSError):
            call, _ = listener.accept()
            if not unix_sockets.is_own(call):
                call.close()
                return
            call.setblocking(False)
            self._callers.add(call)
            self._selector.register(call, selectors.EVENT_READ, partial(self._on_target, call, bytearray()))

    def _on_target(self, call: socket.socket, data: bytearray, mask: int) -> None:
        """Receive the target of `call`, and nothing more: the data after it belongs to the stream."""
        try:
            while missing := _missing_bytes(data):
                piece = call.recv(missing)
                if not piece:
                    raise EOFError
                data += piece
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._forget_caller(call)
            call.close()
            return
        self._forget_caller(call)
        self._join(call, bytes(data[LENGTH.size :]))

    def _forget_caller(self, call: socket.socket) -> None:
        self._callers.remove(call)
        self._selector.unregister(call)


def _missing_bytes(data: bytearray) -> int:
    """Return how many bytes of a target's length, or else of the target, are missing in `data`.

    Raise EOFError if the length is impossible.
    """
    if len(data) < LENGTH.size:
        return LENGTH.size - len(data)
    (length,) = LENGTH.unpack_from(data)
    if not 0 <= length < _CHUNK:
        raise EOFError
    return LENGTH.size + int(length) - len(data)


def _events(out: bytearray) -> int:
    return selectors.EVENT_READ | selectors.EVENT_WRITE if out else selectors.EVENT_READ


def set_keepalive(link: socket.socket) -> None:
    """Have the kernel end the connection when the other machine is silent for :data:`SILENCE` seconds.

    On systems without ``TCP_USER_TIMEOUT`` this takes longer while data is being sent (not tested).
    """
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(SILENCE / _PROBE) - 1)
    if sys.platform == "linux":
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE * 1000))
