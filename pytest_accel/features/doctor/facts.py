"""The facts about a machine and its software that the doctor judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_accel.core.device import Device


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch, determined without importing it."""

    version: str
    builds: Mapping[str, str] = field(default_factory=dict)
    """Versions of ``cuda``, ``hip`` and ``xpu`` that it was built for; empty if it was built for the CPU alone."""


@dataclass(frozen=True, slots=True)
class Nvidia:
    """State of NVIDIA's driver, according to its management library (NVML)."""

    cards: int = 0
    """Number of NVIDIA GPUs that sysfs shows on the PCI bus, with or without a driver."""
    library: bool = False
    """True if ``libnvidia-ml.so.1`` can be loaded."""
    error: str | None = None
    """Why the driver does not answer; None if it does."""
    version: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest CUDA version that the driver supports: major and minor."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of device on this machine, according to its vendor module."""

    name: str
    present: tuple[Device, ...] = ()
    visible: tuple[Device, ...] = ()
    """The devices that the inherited masks leave."""
    inherited: Mapping[str, str] = field(default_factory=dict)
    """Name and value of the kind's mask variables that are set."""
    lacking: str | None = None
    """The part that torch lacks to use the kind, as text; None if it lacks nothing."""
    error: str | None = None
    """Why the kind cannot be used; None if it can."""


@dataclass(frozen=True, slots=True)
class Forks:
    """Result of importing the modules of the fork server in a temporary process."""

    outcome: Literal["fit", "unfit", "failed", "ended", "hung"]
    """`unfit`: ranks must not be forked from the process. `ended`: an import ended the process."""
    name: str = ""
    """The module that was being imported."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LockFolder:
    """The folder of the machine's device locks, which the doctor does not create."""

    path: str
    exists: bool = True
    problem: str | None = None
    """Why the folder cannot be used, as the rest of a sentence after the path: ``is not a directory``."""
    filesystem: str | None = None
    """Type of its file system as in ``/proc/mounts``; None if unknown."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All facts that the checks use. Made by `gather`."""

    accel: str
    """The name in ``--accel``: ``auto``, ``none`` or a kind."""
    session: str
    """The kind of the session's devices; ``none`` if it has none."""
    devices: str
    """The session's devices as text; empty if it has none."""
    ranks: int
    """The number of ranks that may run at once."""
    torch: Torch | None
    nvidia: Nvidia
    kinds: tuple[Kind, ...]
    forks: Forks | None
    """None if torch is not installed."""
    locks: LockFolder
    shared_memory: int | None
    """Size of ``/dev/shm`` in bytes; None on a system without it."""

    def kind(self, name: str) -> Kind | None:
        """Return the kind called `name`; None if it was not inspected."""
        return next((kind for kind in self.kinds if kind.name == name), None)
