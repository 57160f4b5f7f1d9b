"""Helpers of tests that talk to a process over a socket, as an honest or as a hostile peer."""

from __future__ import annotations

import contextlib
import socket


def read_all(end: socket.socket) -> bytes:
    """Return the bytes that arrive until the other end closes the connection; fail if none arrive for 30 seconds."""
    end.settimeout(30)
    found = b""
    with contextlib.suppress(ConnectionResetError):  # The other end was closed before it had read everything.
        while data := end.recv(1 << 16):
            found += data
    return found
