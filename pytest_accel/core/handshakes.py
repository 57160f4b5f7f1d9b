"""Handshakes with whoever connects to a listening socket, all at the same time.

A handshake is a generator: it yields bytes that are to be sent, or the number of bytes that it needs next, which it is
given. So a connection that says nothing, or one byte at a time, holds up no other, and all of them share one deadline.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

from pytest_accel.core.clock import monotonic

Result = TypeVar("Result")
Handshake = Generator[bytes | int, bytes, Result]

PENDING = 64
"""Connections whose handshake may be under way at the same time, besides those that are expected."""


class Refused(Exception):
    """The other end is none that this process talks to, or breaks the protocol."""


_REFUSED = (Refused, EOFError, OSError, ValueError)
"""Errors that end a handshake, and concern nobody else."""


def perform(call: socket.socket, handshake: Handshake[Result], deadline: float) -> Result:
    """Perform `handshake` on `call` and return its result; TimeoutError past `deadline`, EOFError at the end."""
    try:
        step = next(handshake)
        while True:
            if isinstance(step, bytes):
                call.settimeout(max(0.001, deadline - monotonic()))
                call.sendall(step)
                step = handshake.send(b"")
            else:
                step = handshake.send(_receive(call, step, deadline))
    except StopIteration as end:
        call.settimeout(None)
        result: Result = end.value
        return result


def _receive(call: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        call.settimeout(max(0.001, deadline - monotonic()))
        piece = call.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


@dataclass(slots=True, eq=False)
class _Pending(Generic[Result]):
    """A connection whose handshake is under way."""

    call: socket.socket
    handshake: Handshake[Result]
    wanted: int = 0
    data: bytearray = field(default_factory=bytearray)

    def go_on(self, given: bytes) -> None:
        """Send what there is to send, until something is to be received; StopIteration at the end."""
        step = self.handshake.send(given) if given else next(self.handshake)
        while isinstance(step, bytes):
            try:
                sent = self.call.send(step)
            except BlockingIOError:
                sent = 0
            if sent != len(step):
                raise Refused("does not read what it is sent")
            step = self.handshake.send(b"")
        self.wanted = step
        self.data.clear()

    def receive(self) -> None:
        """Receive at most what the handshake needs next, and go on when it is complete; StopIteration at the end."""
        try:
            piece = self.call.recv(self.wanted - len(self.data))
        except BlockingIOError:
            return
        if not piece:
            raise EOFError
        self.data += piece
        if len(self.data) == self.wanted:
            self.go_on(bytes(self.data))


class Handshakes(Generic[Result]):
    """The handshakes on a listening socket, which stays the caller's to close."""

    def __init__(
        self, listener: socket.socket, begin: Callable[[socket.socket], Handshake[Result]], expected: int
    ) -> None:
        """`begin` makes the handshake of a connection, or raises :class:`Refused`.

        `expected` connections, and :data:`PENDING` more, may be under way; where there are more, the oldest is closed.
        """
        self._listener = listener
        self._begin = begin
        self._limit = expected + PENDING
        self._pending: dict[socket.socket, _Pending[Result]] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Handshakes[Result]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for call in list(self._pending):
            self._drop(call)
        self._selector.close()

    def wait(self, deadline: float) -> tuple[socket.socket, Result] | None:
        """Return the next connection whose handshake has succeeded, and the result; None: none until `deadline`."""
        while True:
            left = deadline - monotonic()
            events = self._selector.select(max(0.0, left))
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
            call, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        call.setblocking(False)
        try:
            pending = _Pending(call, self._begin(call))
        except _REFUSED:
            call.close()
            return
        if len(self._pending) >= self._limit:
            self._drop(next(iter(self._pending)))
        self._pending[call] = pending
        self._selector.register(call, selectors.EVENT_READ)
        # A handshake first says what it needs: its result comes with data.
        self._advance(pending, lambda: pending.go_on(b""))

    def _advance(self, pending: _Pending[Result], step: Callable[[], None]) -> tuple[socket.socket, Result] | None:
        try:
            step()
        except StopIteration as end:
            del self._pending[pending.call]
            self._selector.unregister(pending.call)
            pending.call.setblocking(True)
            return pending.call, end.value
        except _REFUSED:
            self._drop(pending.call)
        return None

    def _drop(self, call: socket.socket) -> None:
        self._pending.pop(call).handshake.close()
        self._selector.unregister(call)
        call.close()
