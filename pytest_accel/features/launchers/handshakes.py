"""Concurrent handshakes with all processes that connect to a listening socket.

A handshake is a generator. It yields either bytes to send, or the number of bytes to receive next, which are then sent
into the generator. A connection that sends nothing, or one byte at a time, therefore does not delay the others, and all
connections share one deadline.
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from errno import EBADF, EINVAL, EMFILE, ENFILE, ENOBUFS, ENOMEM, ENOTSOCK
from types import TracebackType
from typing import Generic, TypeVar

from pytest_accel.core.clock import monotonic

Result = TypeVar("Result")
Handshake = Generator[bytes | int, bytes, Result]

PENDING = 64
"""Number of unfinished handshakes that are allowed in addition to the expected connections."""

_UNUSABLE_LISTENER = (EBADF, EINVAL, ENOTSOCK)
"""Errors of accept(2) that concern the listening socket. The others concern one connection, or this moment."""
_EXHAUSTED = (EMFILE, ENFILE, ENOBUFS, ENOMEM)
"""Errors of accept(2) for a lack of descriptors or memory. The connection stays in the queue of the listener."""
_EXHAUSTED_PAUSE = 0.1
"""Seconds until the next try after an error of `_EXHAUSTED`, so that waiting does not keep a core busy."""


class Refused(Exception):
    """The other end is not an accepted peer, or it violated the protocol."""


_REFUSED = (Refused, EOFError, OSError, ValueError)
"""Errors that end one handshake and do not affect the others."""


def perform(connection: socket.socket, handshake: Handshake[Result], deadline: float) -> Result:
    """Perform `handshake` on `connection` and return its result.

    Raise TimeoutError after `deadline`, and EOFError if the other end closes the connection.
    """
    try:
        step = next(handshake)
        while True:
            if isinstance(step, bytes):
                connection.settimeout(max(0.001, deadline - monotonic()))
                connection.sendall(step)
                step = handshake.send(b"")
            else:
                step = handshake.send(_receive(connection, step, deadline))
    except StopIteration as end:
        connection.settimeout(None)
        result: Result = end.value
        return result


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - monotonic()))
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


@dataclass(slots=True, eq=False)
class _Pending(Generic[Result]):
    """A connection whose handshake has not finished."""

    connection: socket.socket
    handshake: Handshake[Result]
    needed: int = 0
    data: bytearray = field(default_factory=bytearray)

    def resume(self, received: bytes) -> None:
        """Resume the handshake with `received` and send its output, until it needs data; StopIteration at its end."""
        step = self.handshake.send(received) if received else next(self.handshake)
        while isinstance(step, bytes):
            try:
                sent = self.connection.send(step)
            except BlockingIOError:
                sent = 0
            if sent != len(step):
                raise Refused("does not read what is sent to it")
            step = self.handshake.send(b"")
        self.needed = step
        self.data.clear()

    def receive(self) -> None:
        """Receive data that the handshake needs, and resume it once all has arrived; StopIteration at its end."""
        try:
            chunk = self.connection.recv(self.needed - len(self.data))
        except BlockingIOError:
            return
        if not chunk:
            raise EOFError
        self.data += chunk
        if len(self.data) == self.needed:
            self.resume(bytes(self.data))


class Handshakes(Generic[Result]):
    """The handshakes on a listening socket. The caller closes the socket."""

    def __init__(
        self,
        listener: socket.socket,
        begin: Callable[[socket.socket], Handshake[Result]],
        expected: int,
        stop: int | None = None,
    ) -> None:
        """`begin` creates the handshake of a connection, or raises :class:`Refused`.

        :meth:`wait` returns None once the descriptor `stop` is readable.

        At most `expected` + :data:`PENDING` handshakes are kept; beyond that, the oldest connection is closed.
        """
        self._listener = listener
        self._begin = begin
        self._limit = expected + PENDING
        self._pending: dict[socket.socket, _Pending[Result]] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._stop = stop
        if stop is not None:
            self._selector.register(stop, selectors.EVENT_READ)

    def __enter__(self) -> Handshakes[Result]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connection in list(self._pending):
            self._drop(connection)
        self._selector.close()

    def wait(self, deadline: float) -> tuple[socket.socket, Result] | None:
        """Return the next connection whose handshake succeeds, with its result, or None after `deadline`.

        `deadline` may be infinite.
        """
        while True:
            left = deadline - monotonic()
            events = self._selector.select(None if left == math.inf else max(0.0, left))
            if any(key.fileobj == self._stop for key, _ in events):
                return None
            for key, _ in events:
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                pending = self._pending.get(key.fileobj)
                if pending is not None and (result := self._advance(pending, pending.receive)) is not None:
                    return result
            if left <= 0:
                return None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _UNUSABLE_LISTENER:
                raise
            if error.errno in _EXHAUSTED:
                time.sleep(_EXHAUSTED_PAUSE)
            return
        connection.setblocking(False)
        try:
            pending = _Pending(connection, self._begin(connection))
        except _REFUSED:
            connection.close()
            return
        if len(self._pending) >= self._limit:
            self._drop(next(iter(self._pending)))
        self._pending[connection] = pending
        self._selector.register(connection, selectors.EVENT_READ)
        # The result can be ignored: no handshake finishes before it has received data.
        self._advance(pending, lambda: pending.resume(b""))

    def _advance(self, pending: _Pending[Result], step: Callable[[], None]) -> tuple[socket.socket, Result] | None:
        try:
            step()
        except StopIteration as end:
            del self._pending[pending.connection]
            self._selector.unregister(pending.connection)
            pending.connection.setblocking(True)
            return pending.connection, end.value
        except _REFUSED:
            self._drop(pending.connection)
        return None

    def _drop(self, connection: socket.socket) -> None:
        self._pending.pop(connection).handshake.close()
        self._selector.unregister(connection)
        connection.close()
