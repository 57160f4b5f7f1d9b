"""How a driver, or the pool, calls a rank: on its own socket, or over the bridge to the machine that it is on."""

from __future__ import annotations

import socket

from pytest_accel.core import unix_sockets
from pytest_accel.core.messages import WorldSpec
from pytest_accel.core.paths import bridge_path, socket_path

ASK = "ask"
"""The stream over which the other machine is asked (`scout`)."""
SERVER = "server"
"""The stream that leads to its fork server."""
_RANK = "rank"


def call_rank(directory: str, spec: WorldSpec, rank: int, pid: int) -> socket.socket:
    """A connection to the rank, whose process is `pid` on its machine; OSError where it does not listen."""
    if spec.is_far(rank):
        return call_far(bridge_path(directory, spec.server_of(rank)), f"{_RANK} {spec.world} {rank} {pid}")
    return unix_sockets.connect(socket_path(directory, spec.world, rank))


def call_far(path: str, name: str) -> socket.socket:
    """A stream to what `name` is on the machine to which the bridge at `path` leads."""
    call = unix_sockets.connect(path)
    call.sendall(f"{name}\n".encode())
    return call


def named_rank(name: str) -> tuple[int, int, int] | None:
    """World, rank and process that the name of a stream stands for; None where it stands for something else."""
    kind, _, numbers = name.partition(" ")
    if kind != _RANK:
        return None
    world, rank, pid = map(int, numbers.split())
    return world, rank, pid
