"""Connections from a driver or the pool to a rank: to its socket, or through the agent of its machine."""

from __future__ import annotations

from socket import socket
from typing import Any

from msgspec import Struct

from pytest_accel.core.session_folder import agent_path, rank_path
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.struct_messages import encode, frame
from pytest_accel.messages.world_spec import WorldSpec


class Inspection(Struct, frozen=True, tag=True):
    """A request to the inspector on an agent's machine; the answer is the result of `method`."""

    method: str
    """The name of a method of `pytest_accel.diagnostics.inspector.MachineInspector`."""
    world: int
    given: Any
    """The argument of `method`."""


class RankTarget(Struct, frozen=True, tag=True):
    """A rank on an agent's machine."""

    world: int
    rank: int
    pid: int
    """The process id on the agent's machine."""


def call_rank(directory: str, spec: WorldSpec, rank: int, pid: int) -> socket:
    """Return a connection to `rank`, with a limit on writes; raise OSError if the rank does not listen.

    `pid` is the process id of the rank on its own machine.
    """
    if spec.is_remote(rank):
        return call_agent(agent_path(directory, spec.servers[rank]), RankTarget(spec.world, rank, pid))
    return unix_sockets.connect(rank_path(directory, spec.world, rank, "sock"))


def call_agent(path: str, target: Inspection | RankTarget) -> socket:
    """Return a connection to `target` on another machine, through the client of its agent, which listens at `path`."""
    stream = unix_sockets.connect(path)
    try:
        unix_sockets.sendall(stream, frame(encode(target)))
    except BaseException:
        stream.close()
        raise
    return stream
