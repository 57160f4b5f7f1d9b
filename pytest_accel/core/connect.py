"""Connections from a driver or the pool to a rank: to its socket, or through the agent of its node."""

from __future__ import annotations

from pickle import dumps
from socket import socket
from struct import Struct as BinaryFormat

from msgspec import Struct

from pytest_accel.core import unix_sockets
from pytest_accel.core.paths import agent_path, socket_path
from pytest_accel.core.world_spec import WorldSpec

TARGET_LENGTH = BinaryFormat("<H")
"""The number of bytes of the pickled target, which follow."""


class ServerTarget(Struct, frozen=True):
    """The fork server that an agent has started last."""


class InspectorTarget(Struct, frozen=True):
    """The inspector on an agent's node (`pytest_accel.diagnostics.inspector`)."""


class RankTarget(Struct, frozen=True):
    """A rank on an agent's node."""

    world: int
    rank: int
    pid: int
    """The process id on the agent's node."""


def call_rank(directory: str, spec: WorldSpec, rank: int, pid: int) -> socket:
    """Return a connection to `rank`, with a limit on writes; raise OSError if the rank does not listen.

    `pid` is the process id of the rank on its own node.
    """
    if spec.is_remote(rank):
        return call_agent(agent_path(directory, spec.server_of(rank)), RankTarget(spec.world, rank, pid))
    return unix_sockets.connect(socket_path(directory, spec.world, rank), limited=True)


def call_agent(path: str, target: object) -> socket:
    """Return a connection to `target` on another node, through the client of its agent, which listens at `path`."""
    stream = unix_sockets.connect(path, limited=True)
    data = dumps(target)
    try:
        unix_sockets.sendall(stream, TARGET_LENGTH.pack(len(data)) + data)
    except BaseException:
        stream.close()
        raise
    return stream
