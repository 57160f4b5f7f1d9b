"""Connections from a driver or the pool to a rank: to its socket, or over the bridge to its machine."""

from __future__ import annotations

import socket

from pytest_accel.core import unix_sockets
from pytest_accel.core.paths import bridge_path, socket_path
from pytest_accel.core.world_spec import WorldSpec

ASK = "ask"
"""Name of the stream to the inspector on the other machine (`pytest_accel.diagnostics.inspector`)."""
SERVER = "server"
"""Name of the stream to the fork server on the other machine."""
_RANK = "rank"


def call_rank(directory: str, spec: WorldSpec, rank: int, pid: int) -> socket.socket:
    """Return a connection to `rank`; raise OSError if it does not listen.

    `pid` is the process id of the rank on its own machine.
    """
    if spec.is_far(rank):
        return call_far(bridge_path(directory, spec.server_of(rank)), f"{_RANK} {spec.world} {rank} {pid}")
    return unix_sockets.connect(socket_path(directory, spec.world, rank))


def call_far(path: str, name: str) -> socket.socket:
    """Open the stream `name` on another machine, over the bridge whose socket is at `path`, and return it."""
    stream = unix_sockets.connect(path)
    stream.sendall(f"{name}\n".encode())
    return stream


def named_rank(name: str) -> tuple[int, int, int] | None:
    """Return the world, rank and pid in the stream name `name`, or None if `name` is not that of a rank's stream."""
    kind, _, numbers = name.partition(" ")
    if kind != _RANK:
        return None
    world, rank, pid = map(int, numbers.split())
    return world, rank, pid
