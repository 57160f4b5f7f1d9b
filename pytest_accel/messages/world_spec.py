"""Description of a world: the needs of its tests, its devices, machines and fork servers, and the roles of its ranks.

Each rank has the identity of one of pytest-xdist's workers: suites tell the main process from others by
`config.workerinput`, and name things that are not shared by the worker's id.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from pytest_accel.core.device import Device, Share
from pytest_accel.core.stash_keys import RUN_OF_RANK
from pytest_accel.core.world_key import WorldKey

WORKER_VARIABLES = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
"""The variables that xdist sets in a worker."""


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Description of a world: its ranks, their devices and their machines."""

    world: int
    """Number of the world in its session."""
    key: WorldKey
    """The needs of the tests of the world."""
    servers: tuple[int, ...]
    """Number of each rank's fork server; 0 is the driver's own."""
    machines: tuple[int, ...]
    """Number, in the session, of each rank's machine; 0 is the driver's."""
    kind_argument: str | None = None
    """Argument of the kind in ``--accel`` (the `8` of ``sim:8``), or None."""
    devices: tuple[Device, ...] = ()
    """All devices of the lease, rank by rank. A device that several ranks share occurs several times."""
    addresses: tuple[str, ...] = ()
    """Network address of each rank's machine; empty if all ranks are on one machine."""
    workers: tuple[int, ...] = ()
    """Number of each rank among xdist's workers: the lowest that no other living rank of the session has."""
    worker_count: int = 0
    """A number that is larger than those of all living ranks."""
    secret: bytes = field(default_factory=lambda: os.urandom(32), repr=False, compare=False)
    """Key that authenticates the ranks' values in their store (`pytest_accel.rank.signed_store`)."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.key.ranks

    @property
    def share(self) -> Share | None:
        """Share that each rank has of each of its devices; None for whole devices."""
        return None if self.key.need is None else self.key.need.share

    def is_remote(self, rank: int) -> bool:
        """Return whether `rank` is on another machine than the driver."""
        return self.machines[rank] != 0

    @property
    def machine_count(self) -> int:
        """Number of machines that the ranks are on."""
        return len(set(self.machines))

    def machine_rank(self, rank: int) -> int:
        """Return the position of `rank`'s machine among the machines of the world."""
        return sorted(set(self.machines)).index(self.machines[rank])

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the machine of `rank`, including itself. Its position among them is its local rank."""
        return tuple(other for other in range(self.ranks) if self.machines[other] == self.machines[rank])

    def devices_of(self, rank: int) -> tuple[Device, ...]:
        """Return the devices that belong to `rank`."""
        first = rank * self.key.devices_per_rank
        return self.devices[first : first + self.key.devices_per_rank]

    def seen_by(self, rank: int) -> tuple[Device, ...]:
        """Return the devices that the mask of `rank` shows: its own, or all of the world on its machine."""
        if self.key.visible == "rank":
            return self.devices_of(rank)
        return tuple(dict.fromkeys(device for other in self.neighbours(rank) for device in self.devices_of(other)))


def worker_environment(given: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the variables that xdist sets in a worker with this input, for a rank."""
    values = (given["workerid"], str(given["workercount"]), given["testrunuid"])
    return {**dict(zip(WORKER_VARIABLES, values, strict=True)), RUN_OF_RANK: given["testrunuid"]}


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
