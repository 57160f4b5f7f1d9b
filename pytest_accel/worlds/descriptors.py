"""Open files that go from one process to another, behind a message on the connection between them (unix(7))."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection


def send(connection: Connection, descriptors: Sequence[int]) -> None:
    """Raises OSError where nobody is at the other end. They stay open in this process."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        socket.send_fds(end, [b"\0"], list(descriptors))


def receive(connection: Connection, count: int) -> list[int]:
    """So many of them, which are this process's to close; EOFError where they do not come."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        _, descriptors, _, _ = socket.recv_fds(end, 1, count)
    if len(descriptors) != count:
        raise EOFError
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return descriptors
