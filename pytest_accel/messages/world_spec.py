"""Description of a world: the needs of its tests, and the devices, machines and fork servers that it has."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from pytest_accel.core.device import Device, Share
from pytest_accel.core.world_key import WorldKey
from pytest_accel.messages.worker_input import WorkerInput


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Description of a world: its ranks, their devices and their machines."""

    world: int
    """Number of the world in its session."""
    key: WorldKey
    """The needs of the tests of the world."""
    kind_argument: str | None = None
    """Argument of the kind in ``--accel`` (the `8` of ``sim:8``), or None."""
    devices: tuple[Device, ...] = ()
    """All devices of the lease, rank by rank. A device that several ranks share occurs several times."""
    servers: tuple[int, ...] = ()
    """Number of each rank's fork server; empty if the driver's own server forks all ranks."""
    machines: tuple[int, ...] = ()
    """Number of each rank's machine; 0 is the driver's. Empty if all ranks are on the driver's machine."""
    addresses: tuple[str, ...] = ()
    """Network address of each rank's machine; empty if all ranks are on one machine."""
    workers: tuple[WorkerInput, ...] = field(default=(), repr=False, compare=False)
    """`config.workerinput` of each rank."""
    secret: bytes = field(default_factory=lambda: os.urandom(32), repr=False, compare=False)
    """Key that authenticates the ranks' values in their store (`pytest_accel.rank.signed_store`)."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.key.ranks

    @property
    def grouped(self) -> bool:
        """True if the ranks form a distributed world; False for one process that only has devices."""
        return self.key.grouped

    @property
    def share(self) -> Share | None:
        """Share that each rank has of each of its devices; None for whole devices."""
        return None if self.key.need is None else self.key.need.share

    def server_of(self, rank: int) -> int:
        """Return the number of the fork server of `rank`."""
        return self.servers[rank] if self.servers else 0

    @property
    def server_numbers(self) -> frozenset[int]:
        """The numbers of the fork servers of all ranks."""
        return frozenset(self.servers or (0,))

    def machine_of(self, rank: int) -> int:
        """Return the number, in the session, of the machine of `rank`."""
        return self.machines[rank] if self.machines else 0

    def is_remote(self, rank: int) -> bool:
        """Return whether `rank` is on another machine than the driver."""
        return bool(self.machines and self.machines[rank])

    @property
    def machine_count(self) -> int:
        """Number of machines that the ranks are on."""
        return len(set(self.machines)) or 1

    def machine_rank(self, rank: int) -> int:
        """Return the position of `rank`'s machine among the machines of the world."""
        return sorted(set(self.machines)).index(self.machines[rank]) if self.machines else 0

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the machine of `rank`, including itself. Its position among them is its local rank."""
        if not self.machines:
            return tuple(range(self.ranks))
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
