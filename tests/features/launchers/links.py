"""Both ends of an authenticated TCP connection, without the greeting."""

from __future__ import annotations

import socket

from pytest_accel.features.launchers.authentication import Peer, SealedFrames
from pytest_accel.features.launchers.greeting import AuthenticatedLink


def frames_pair(key: bytes = b"of this connection alone") -> tuple[SealedFrames, SealedFrames]:
    """Return the frames of the listener and of the caller."""
    return SealedFrames(Peer(1, key), caller=False), SealedFrames(Peer(1, key), caller=True)


def link_pair() -> tuple[AuthenticatedLink, AuthenticatedLink]:
    """Return the listener's end and the caller's end of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        call = socket.create_connection(server.getsockname())
        ends = server.accept()[0], call
    one, other = (AuthenticatedLink(end, frames) for end, frames in zip(ends, frames_pair(), strict=True))
    return one, other
