"""The role of a process: its rank, its world, and its connections."""

from __future__ import annotations

import socket
from typing import NamedTuple

from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.rank.process_group import StorePort


class Role(NamedTuple):
    """The rank that a forked process becomes, and its sockets."""

    spec: WorldSpec
    rank: int
    listener: socket.socket
    """Accepts connections from drivers."""
    store_port: StorePort | None
    """None in a world without a process group."""
