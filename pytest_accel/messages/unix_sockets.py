"""Unix sockets between processes of one user.

Their paths are in folders that only this user can enter, and that no other user can replace (`core/session_folder.py`):
so whoever listens or connects there is this user, or root.

File descriptors are passed from one process to another after a message on their connection (unix(7)).
"""

from __future__ import annotations

from _socket import socket as _Plain
from _socket import socketpair
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EMFILE
from math import ceil
from multiprocessing.connection import Connection as _Connection
from os import close, set_inheritable, strerror
from select import POLLIN, poll
from socket import AF_UNIX, SO_RCVTIMEO, SO_SNDTIMEO, SOL_SOCKET, recv_fds, socket
from struct import pack

from pytest_accel.core.signals import without_sigpipe

_accept = socket._accept  # type: ignore[attr-defined]
# The methods of the base class in C. A suite that guards its network replaces the methods of `socket.socket`.
_bind, _listen, _connect, _setblocking = _Plain.bind, _Plain.listen, _Plain.connect, _Plain.setblocking
_setsockopt = _Plain.setsockopt
WRITE_TIMEOUT = 30
"""Seconds that a write may wait for the process at the other end, which is stopped or hangs if it does not read."""


class Connection(_Connection):
    """A connection whose writes raise an error, and no signal, if the other end is closed."""

    def send_bytes(self, data: bytes) -> None:  # type: ignore[override]
        with without_sigpipe():
            super().send_bytes(data)


def sendall(connection: socket, data: bytes) -> None:
    """Send `data` as :meth:`socket.sendall` does; raise OSError, and no signal, if the other end is closed."""
    with without_sigpipe():
        _Plain.sendall(connection, data)


def listen(path: str, backlog: int) -> socket:
    """Return a listening socket at `path`; raise OSError if the path exists."""
    listener = socket(AF_UNIX)
    try:
        _bind(listener, path)
        _listen(listener, backlog)
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: str) -> socket:
    """Return a connection to `path`, with a limit on writes (:func:`limit_writes`).

    Raise PermissionError if the path is another user's, and OSError if no process listens there.
    """
    connection = socket(AF_UNIX)
    try:
        _setblocking(connection, True)  # Tests may have set a default timeout.
        limit_writes(connection)
        _connect(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def pair(*, blocking: bool = True) -> tuple[socket, socket]:
    """Return two connected sockets. Unlike `socket.socketpair`, this does not look up `socket.socket`."""
    one, other = socketpair()
    ends = socket(fileno=one.detach()), socket(fileno=other.detach())
    for end in ends:
        _setblocking(end, blocking)
    return ends


def limit_writes(connection: socket) -> None:
    """Have a write to the blocking `connection` raise BlockingIOError after `WRITE_TIMEOUT` without progress.

    The other end may have received a part of the data, so the connection cannot be used any more.
    """
    _setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, pack("ll", WRITE_TIMEOUT, 0))


def limit_reads(connection: socket, seconds: int) -> None:
    """Have a read from the blocking `connection` raise BlockingIOError after `seconds` in which nothing arrives."""
    _setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, pack("ll", seconds, 0))


def accept(listener: socket) -> socket:
    """Wait for a connection, and return it.

    Tests may replace `socket.socket` and set a default timeout; `listener.accept()` would use both.
    """
    connection = socket(fileno=_accept(listener)[0])
    _setblocking(connection, True)
    return connection


def is_readable(descriptor: int, timeout: float = 0.0) -> bool:
    """Return whether `descriptor` has data or has ended; wait for that at most `timeout` seconds.

    This reads no clock: a test may have stopped the clock that `multiprocessing` reads.
    """
    waiting = poll()
    waiting.register(descriptor, POLLIN)
    return bool(waiting.poll(ceil(timeout * 1000)))


def has_ended(descriptor: int) -> bool:
    """Return whether the other end of a connection is closed, even if data has arrived before that."""
    waiting = poll()
    waiting.register(descriptor, 0)  # poll() always reports the end.
    return bool(waiting.poll(0))


MOST_AT_ONCE = 200
"""Descriptors that one message carries at most; Linux allows 253 (``SCM_MAX_FD``)."""


def receive_descriptors(connection: _Connection, count: int) -> list[int]:
    """Receive `count` descriptors, which the caller has to close.

    Raise EOFError if the other end is closed, and OSError if this process may not open as many files.
    """
    received: list[int] = []
    with socket_of(connection) as end:
        while len(received) < count:
            expected = min(count - len(received), MOST_AT_ONCE)
            data, more, _, _ = recv_fds(end, 1, expected)
            received += more
            if len(more) < expected:
                for descriptor in received:
                    close(descriptor)
                if not data:
                    raise EOFError
                raise OSError(EMFILE, f"{strerror(EMFILE)}: {len(received)} of {count} descriptors were received")
    for descriptor in received:
        set_inheritable(descriptor, False)
    return received


@contextmanager
def socket_of(connection: _Connection) -> Iterator[socket]:
    """Provide the `connection` as a socket, which must not be closed."""
    end = socket(fileno=connection.fileno())
    try:
        end.setblocking(True)  # Tests may have set a default timeout for sockets.
        yield end
    finally:
        end.detach()
