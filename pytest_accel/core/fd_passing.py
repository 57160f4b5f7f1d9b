"""Open files that go from one process to another, behind a message on the connection between them (unix(7))."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from os import dup, set_inheritable
from socket import recv_fds, send_fds, socket


def send(connection: Connection, descriptors: Sequence[int]) -> None:
    """Raises OSError where nobody is at the other end. They stay open in this process."""
    with socket(fileno=dup(connection.fileno())) as end:
        send_fds(end, [b"\0"], list(descriptors))


def receive(connection: Connection, count: int) -> list[int]:
    """So many of them, which are this process's to close; EOFError where they do not come."""
    with socket(fileno=dup(connection.fileno())) as end:
        _, descriptors, _, _ = recv_fds(end, 1, count)
    if len(descriptors) != count:
        raise EOFError
    for descriptor in descriptors:
        set_inheritable(descriptor, False)
    return descriptors
