"""File descriptors passed from one process to another, after a message on their connection (unix(7))."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from os import dup, set_inheritable
from socket import recv_fds, send_fds, socket


def send(connection: Connection, descriptors: Sequence[int]) -> None:
    """Send `descriptors`, which stay open in this process; raise OSError if the other end is closed."""
    with socket(fileno=dup(connection.fileno())) as end:
        send_fds(end, [b"\0"], list(descriptors))


def receive(connection: Connection, count: int) -> list[int]:
    """Receive `count` descriptors, which the caller has to close; raise EOFError if fewer arrive."""
    with socket(fileno=dup(connection.fileno())) as end:
        _, descriptors, _, _ = recv_fds(end, 1, count)
    if len(descriptors) != count:
        raise EOFError
    for descriptor in descriptors:
        set_inheritable(descriptor, False)
    return descriptors
