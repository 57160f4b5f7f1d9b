"""The key that decides which tests can run in the same world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pytest_accel.core.device import DeviceNeed


@dataclass(frozen=True, slots=True)
class WorldKey:
    """Key of a world: tests with equal keys can run in the same world, one after the other."""

    kind: str
    need: DeviceNeed | None
    """Devices to lease for the whole world; None for ranks on the CPU, without a lease."""
    ranks: int
    """Number of processes; 0 for devices of this machine that a test uses in its driver, without a world."""
    grouped: bool
    """True if the ranks form a distributed world; False for a process that only has devices."""
    backend: str | None = None
    init: bool = True
    devices_per_rank: int = 0
    visible: Literal["world", "rank"] = "world"
    env: tuple[tuple[str, str], ...] = ()
    fresh: bool = False
    launcher: str | None = None
    """Program that starts the ranks' processes; None for a fork server of the session."""
    machines: int = 1
    """Minimum number of machines that the ranks must be on."""
    fake_size: int | None = None
    """Size of a fake process group, in which the world's process is a rank; None if each rank is a process."""

    @property
    def about(self) -> str:
        """Short description of the world, for display."""
        if self.fake_size is not None:
            return f"one process of a fake group of {self.fake_size}, whose collectives exchange nothing"
        return f"{self.ranks} on {self.kind}" if self.grouped else self.kind

    @property
    def group_size(self) -> int:
        """Number of ranks of the default process group."""
        return self.ranks if self.fake_size is None else self.fake_size

    @property
    def in_cluster(self) -> bool:
        """True if a session on a cluster runs the world there, and False if it does so on the controller's machine.

        An MPI job always runs on the controller's machine, and slots of the kind ``cpu`` are leased there.
        """
        in_cluster = self.machines > 1 or (self.need is not None and self.kind != "cpu")
        return in_cluster and self.launcher is None and self.ranks > 0

    def needs(self, machines: Sequence[int]) -> dict[int, DeviceNeed]:
        """Return the devices to lease on each machine, if any. `machines` has the machine of each rank."""
        counts = Counter(machines)
        return {
            machine: replace(
                self.need, count=ranks * self.devices_per_rank, sets=ranks if self.need.sets > 1 else self.need.sets
            )
            for machine, ranks in counts.items()
            if self.need is not None
        }


def backend_names(backend: str | None) -> list[str]:
    """Return the names in ``cpu:gloo,cuda:nccl``, a `backend` of `torch.distributed.init_process_group`."""
    return [part.rpartition(":")[2].lower() for part in backend.split(",")] if backend else []
