"""File descriptors passed from one process to another, after a message on their connection (unix(7))."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EMFILE
from multiprocessing.connection import Connection
from os import close, set_inheritable, strerror
from socket import recv_fds, send_fds, socket

from pytest_accel.core.signals import without_sigpipe

MOST_AT_ONCE = 200
"""Descriptors that one message carries at most; Linux allows 253 (``SCM_MAX_FD``)."""


def send(connection: Connection, descriptors: Sequence[int]) -> None:
    """Send a few `descriptors`, which stay open in this process; raise OSError if the other end is closed."""
    with socket_of(connection) as end, without_sigpipe():
        send_fds(end, [b"\0"], list(descriptors))


def receive(connection: Connection, count: int) -> list[int]:
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
def socket_of(connection: Connection) -> Iterator[socket]:
    """Provide the `connection` as a socket, which must not be closed."""
    end = socket(fileno=connection.fileno())
    try:
        end.setblocking(True)  # Tests may have set a default timeout for sockets.
        yield end
    finally:
        end.detach()
