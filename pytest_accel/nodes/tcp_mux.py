"""Many streams of bytes, and messages, over one TCP connection between two machines.

A stream is a connected socket at each end, whose bytes the bridge carries. What it holds for a reader that is slow is
not bounded: all that comes to a driver is cut by those who send it, and one stream must not hold up the others.

Each frame has an authentication code (`frame_auth`), which is checked before anything is done with the frame. One that
is wrong ends the connection.

That a machine has been cut off is found by the kernel (tcp(7): SO_KEEPALIVE, TCP_USER_TIMEOUT): a process that computes
for a minute without letting go of the interpreter is not taken for lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import selectors
import socket
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from pytest_accel.core import unix_sockets
from pytest_accel.core.clock import monotonic
from pytest_accel.core.frame_auth import TAG, ForgedFrame, FrameAuth

SILENCE = 10.0
"""Seconds after which a machine that does not answer any more counts as lost."""
_PROBE = 2
"""Seconds between two questions to a machine that says nothing."""
_HEAD = struct.Struct("<BII")
_OPEN, _DATA, _CLOSE, _PART, _MESSAGE = range(5)
"""Kinds of frames. A message is sent as any number of `_PART` frames and one `_MESSAGE` frame."""
_CHUNK = 1 << 16
"""Bytes that a frame carries at most, so that a forged length is found at once."""
_LONGEST_NAME = 200


class Opened(NamedTuple):
    """What a stream is to lead to."""

    socket: socket.socket
    end: int | None = None
    """A descriptor that is readable once the process at the other end of the socket has ended."""


@dataclass(slots=True, eq=False)
class _Stream:
    number: int
    socket: socket.socket
    end: int | None
    out: bytearray = field(default_factory=bytearray)
    closing: bool = False
    """Whether it ends when `out` is empty."""


class Bridge:
    """One end of it. :meth:`run` does the work in one thread; the other methods may be called in any."""

    def __init__(
        self,
        link: socket.socket,
        *,
        key: bytes,
        first: int,
        open_stream: Callable[[str], Opened],
        take: Callable[[Any], None],
    ) -> None:
        """`key` is one that only the two ends have. `first` is 0 at one end and 1 at the other.

        `open_stream` makes what the other end asks for by name; it raises OSError where there is no such thing. `take`
        gets the messages.
        """
        self.broken = False
        """True if the connection ended because a frame failed authentication, or by an error at this end."""
        self._link = link
        self._sent = FrameAuth(key, first)
        self._received = FrameAuth(key, 1 - first)
        self._parts = bytearray()
        """The parts received so far of an incomplete message."""
        self._open_stream = open_stream
        self._take = take
        self._numbers = count(first, 2)
        self._streams: dict[int, _Stream] = {}
        self._listeners: list[socket.socket] = []
        self._callers: set[socket.socket] = set()
        """Accepted connections that have not sent the name of their stream yet."""
        self._in = bytearray()
        self._out = bytearray()
        self._deadline: float | None = None
        self._posted: deque[Callable[[], object]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._lock = threading.Lock()
        self._over = False
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        link.setblocking(False)
        heed_silence(link)
        self._selector.register(link, selectors.EVENT_READ, self._on_link)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)

    def send(self, message: object) -> None:
        """Have the other end take `message`; nothing happens where that is gone."""
        self._post(partial(self._put_message, pickle.dumps(message)))

    def join(self, end: socket.socket, name: str) -> None:
        """Make a stream of `end`, which is the bridge's to close, and of what `name` is at the other end."""
        if not self._post(partial(self._join, end, name)):
            end.close()

    def listen(self, path: str) -> None:
        """Make each connection to `path` a stream: what it leads to is the first line that comes over it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = unix_sockets.listen(path, 64)
        listener.setblocking(False)
        if not self._post(partial(self._listen, listener)):
            listener.close()

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call once, in the bridge's thread, when `descriptor` is readable; it is closed then."""

        def on_ready(mask: int) -> None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            call()

        self._post(lambda: self._selector.register(descriptor, selectors.EVENT_READ, on_ready))

    def settle(self, patience: float) -> None:
        """Wait until what was to be sent is on its way."""
        settled = threading.Event()
        if self._post(settled.set):
            settled.wait(patience)

    def expire(self, seconds: float) -> None:
        """Have :meth:`run` come back so many seconds from now, if the other end is not gone before."""
        self._deadline = monotonic() + seconds
        self._post(lambda: None)

    def run(self) -> str | None:
        """Carry until the other end is gone; gives why, or None where it has closed the connection in good order.

        The reason may be an error at this end, with its traceback: others wait for this thread, so it must not end
        without a report.
        """
        try:
            while self._deadline is None or monotonic() < self._deadline:
                left = None if self._deadline is None else max(0.0, self._deadline - monotonic())
                for key, mask in self._selector.select(left):
                    now = self._selector.get_map().get(key.fd)
                    if now is not None and now.fileobj is key.fileobj:  # Else one before it has closed it.
                        key.data(mask)
            return None
        except EOFError:
            return None
        except ForgedFrame as error:
            self.broken = True
            return str(error)
        except OSError as error:
            if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN):
                return f"nothing was heard of it for {SILENCE:g} s"
            return str(error)
        except Exception:
            self.broken = True
            return f"an error at this end of the connection to it:\n{traceback.format_exc()}"
        finally:
            self._end()

    def leave_to_parent(self) -> None:
        """In a process that was forked from this one: let go of the connection."""
        self._link.close()

    # In the thread of `run`

    def _post(self, call: Callable[[], object]) -> bool:
        with self._lock:
            if self._over:
                return False
            self._posted.append(call)
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"w")
            return True

    def _on_wake(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._posted:
            self._posted.popleft()()

    def _end(self) -> None:
        with self._lock:
            self._over = True
        for call in self._posted:
            for end in call.args if isinstance(call, partial) else ():
                if isinstance(end, socket.socket):
                    end.close()
        for stream in list(self._streams.values()):
            self._drop(stream)
        for held in (*self._listeners, *self._callers):
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
        at = 0
        while len(self._in) - at >= _HEAD.size:
            kind, number, length = _HEAD.unpack_from(self._in, at)
            if length > _CHUNK:
                raise ForgedFrame
            end = at + _HEAD.size + length
            if len(self._in) < end + TAG:
                break
            frame = bytes(self._in[at:end])
            self._received.check(frame, self._in[end : end + TAG])
            self._take_frame(kind, number, frame[_HEAD.size :])
            at = end + TAG
        del self._in[:at]

    def _take_frame(self, kind: int, number: int, data: bytes) -> None:
        if kind == _PART:
            self._parts += data
        elif kind == _MESSAGE:
            try:
                message = pickle.loads(self._parts + data)
                self._parts.clear()
                self._take(message)
            except (EOFError, OSError) as error:  # Not the connection's.
                raise RuntimeError("a message could not be handled") from error
        elif kind == _OPEN:
            try:
                opened = self._open_stream(data.decode())
            except OSError:
                self._put(_CLOSE, number, b"")
            else:
                self._add(number, opened)
        elif number in self._streams:  # Else it has been closed at this end meanwhile.
            stream = self._streams[number]
            if kind == _DATA:
                stream.out += data
            else:
                stream.closing = True
            self._flush(stream)

    def _put_message(self, data: bytes) -> None:
        last = max(0, len(data) - 1) // _CHUNK * _CHUNK
        for at in range(0, last, _CHUNK):
            self._put(_PART, 0, data[at : at + _CHUNK])
        self._put(_MESSAGE, 0, data[last:])

    def _put(self, kind: int, number: int, data: bytes) -> None:
        frame = _HEAD.pack(kind, number, len(data)) + data
        self._out += frame
        self._out += self._sent.tag(frame)
        self._flush_link()

    def _flush_link(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._out:
                del self._out[: self._link.send(self._out)]
        self._selector.modify(self._link, _events(self._out), self._on_link)

    def _join(self, end: socket.socket, name: str) -> None:
        number = next(self._numbers)
        self._put(_OPEN, number, name.encode())
        self._add(number, Opened(end))

    def _add(self, number: int, opened: Opened) -> None:
        stream = self._streams[number] = _Stream(number, *opened)
        stream.socket.setblocking(False)
        self._selector.register(stream.socket, selectors.EVENT_READ, partial(self._on_stream, stream))
        if stream.end is not None:
            self._selector.register(stream.end, selectors.EVENT_READ, partial(self._on_end, stream))

    def _on_stream(self, stream: _Stream, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(stream)
        if mask & selectors.EVENT_READ and stream.number in self._streams:
            self._carry(stream)

    def _carry(self, stream: _Stream) -> bool:
        """Send on a piece of what has come; whether there was one."""
        try:
            data = stream.socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._put(_DATA, stream.number, data)
        else:
            self._put(_CLOSE, stream.number, b"")
            self._drop(stream)
        return bool(data)

    def _on_end(self, stream: _Stream, mask: int) -> None:
        """Something that the process has forked may hold the socket open, and nothing more is to come from itself."""
        while self._carry(stream):
            pass
        if stream.number in self._streams:
            self._put(_CLOSE, stream.number, b"")
            self._drop(stream)

    def _flush(self, stream: _Stream) -> None:
        try:
            while stream.out:
                del stream.out[: stream.socket.send(stream.out)]
        except BlockingIOError:
            pass
        except OSError:  # Nobody reads: what has been written there may still be on its way here.
            stream.out.clear()
        if stream.closing and not stream.out:
            self._drop(stream)
        else:
            self._selector.modify(stream.socket, _events(stream.out), partial(self._on_stream, stream))

    def _drop(self, stream: _Stream) -> None:
        del self._streams[stream.number]
        self._selector.unregister(stream.socket)
        stream.socket.close()
        if stream.end is not None:
            self._selector.unregister(stream.end)
            os.close(stream.end)

    def _listen(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, partial(self._on_call, listener))

    def _on_call(self, listener: socket.socket, mask: int) -> None:
        with contextlib.suppress(OSError):
            call, _ = listener.accept()
            if not unix_sockets.is_own(call):
                call.close()
                return
            call.setblocking(False)
            self._callers.add(call)
            self._selector.register(call, selectors.EVENT_READ, partial(self._on_name, call, bytearray()))

    def _on_name(self, call: socket.socket, text: bytearray, mask: int) -> None:
        try:
            while not text.endswith(b"\n") and len(text) < _LONGEST_NAME:
                piece = call.recv(1)  # What stands behind the line belongs to the stream.
                if not piece:
                    raise EOFError
                text += piece
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._let_go(call)
            call.close()
            return
        self._let_go(call)
        self._join(call, text.decode().strip())

    def _let_go(self, call: socket.socket) -> None:
        self._callers.remove(call)
        self._selector.unregister(call)


def _events(out: bytearray) -> int:
    return selectors.EVENT_READ | selectors.EVENT_WRITE if out else selectors.EVENT_READ


def heed_silence(link: socket.socket) -> None:
    """Have the kernel find out that the other machine has been cut off, after :data:`SILENCE` seconds at most.

    On systems without ``TCP_USER_TIMEOUT`` it takes longer while something is being sent; that was not tried.
    """
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(SILENCE / _PROBE) - 1)
    if sys.platform == "linux":
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE * 1000))
