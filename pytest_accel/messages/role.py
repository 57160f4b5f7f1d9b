"""The role of a rank's process, which the fork server gives it, and the address where its world's ranks meet."""

from __future__ import annotations

import sys

from msgspec import Struct

from pytest_accel.messages.world_spec import WorldSpec

LOOPBACK = "127.0.0.1"


class Role(Struct, frozen=True):
    """The rank that a forked process becomes, and the descriptors of its sockets."""

    spec: WorldSpec
    rank: int
    listener: int
    """Accepts connections from drivers."""
    port: int | None
    """The port of the world's store, on the machine of rank 0; None in a world without a process group."""
    store: int | None
    """The socket bound to this port, on which rank 0 serves the store; None in all other ranks."""
    locks: tuple[int, ...] = ()
    """Descriptors of the lock files of the world's devices.

    A lock of this kind (flock(2)) belongs to the open file, which forks share: so the devices stay locked as long as
    the rank, or a process that it has forked, lives, even if nothing else of the session does.
    """


def host_of(spec: WorldSpec) -> str:
    """Return the address of the world's store."""
    return spec.addresses[0] if spec.addresses else LOOPBACK


def loopback_interface() -> str:
    """Return the name of the network interface for connections within this machine."""
    return "lo0" if sys.platform == "darwin" else "lo"
