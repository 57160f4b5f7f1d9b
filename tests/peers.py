"""Helpers of tests that talk to a process over a socket, as an honest or as a hostile peer."""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator

from tests.deadline import TIMEOUT, scaled


def read_all(end: socket.socket) -> bytes:
    """Return the bytes that arrive until the other end closes the connection; fail if none arrive for a long time."""
    end.settimeout(scaled(TIMEOUT))
    found = b""
    with contextlib.suppress(ConnectionResetError):  # The other end was closed before it had read everything.
        while data := end.recv(1 << 16):
            found += data
    return found


@contextlib.contextmanager
def forked_copy() -> Iterator[None]:
    """Have a forked copy of this process, with all of its open files, as long as the context lasts."""
    until, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Newer Pythons warn of forks of processes that have threads.
        child = os.fork()
    if not child:
        os.close(write)
        os.read(until, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(write)
        os.close(until)
        os.waitpid(child, 0)
