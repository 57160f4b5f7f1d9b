"""The needs of a test: the key of its world, its own leases, and its needs in the words of ``--accel-select``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from pytest_accel.core.device import DeviceNeed

if TYPE_CHECKING:
    import pytest


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


class Needs(NamedTuple):
    """The needs of one test in this session. The defaults hold for a test without marks."""

    devices: int = 0
    """Number of accelerators that all ranks of the test use together; a shared device counts for each rank."""
    world_size: int = 1
    """Number of processes that run the test; 1 for a rank of a fake process group."""
    nodes: int = 1
    """Minimum number of machines."""
    ranks_per_node: int = 1
    """Number of ranks on the machine with the most of them, if they are on `nodes` machines."""
    kind: str = "none"
    """Kind of the devices; ``cpu`` for ranks without accelerators; ``none`` for a test that names no kind, in a session
    without devices, and for a test without marks."""
    memory: int = 0
    """Bytes that each device must have; 0 if the marks do not say."""
    backend: tuple[str, ...] = ()
    """Names of the backends of the default process group; none if the plugin does not create the group."""
    share: float = 1.0
    """Fraction of each device that the test takes; 1.0 for whole devices."""
    marked: bool = False
    """True if the test has the mark ``devices`` or ``distributed``."""
    fits: bool = True
    """True if this machine has all that the test needs."""


class DriverLeases(NamedTuple):
    """The leases that a test takes for itself, in its driver: before its phases, and before its world, if any."""

    keys: tuple[WorldKey, ...]
    """The key of each lease. All tests of all sessions have one order of leases: this prevents deadlocks."""
    missing: str | None = None
    """Reason to skip the test, because this session can never run it; None if it can run."""
    marks: tuple[pytest.Mark, ...] = ()
    """The marks of the test that say so."""
