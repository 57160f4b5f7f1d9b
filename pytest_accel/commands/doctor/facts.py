"""What the doctor knows when it judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_accel.core.device import Device
from pytest_accel.hardware.health import Health


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch, which is not imported for this."""

    version: str
    builds: Mapping[str, str] = field(default_factory=dict)
    """Of ``cuda``, ``hip`` and ``xpu`` what it was built for, with the versions; empty: the CPU alone."""


@dataclass(frozen=True, slots=True)
class Nvidia:
    """NVIDIA's driver, asked through its management library (NVML)."""

    cards: int = 0
    """GPUs of NVIDIA's that sysfs shows on the PCI bus, whether there is a driver or not."""
    library: bool = False
    """Whether ``libnvidia-ml.so.1`` can be loaded."""
    error: str | None = None
    """Why the driver does not answer."""
    version: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports."""
    sick: tuple[tuple[str, str], ...] = ()
    """Id and reason of each GPU that is left out as sick."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of device, as its vendor sees it here."""

    name: str
    hardware: bool = True
    published: bool = False
    """Whether it comes from another package."""
    present: tuple[Device, ...] = ()
    visible: tuple[Device, ...] = ()
    """What the inherited masks leave."""
    inherited: Mapping[str, str] = field(default_factory=dict)
    """The kind's mask variables that are set."""
    lacking: str | None = None
    """What torch lacks to use it, in words."""
    notes: tuple[str, ...] = ()
    health: Mapping[str, Health] = field(default_factory=dict)
    """By id, where the vendor can tell."""
    error: str | None = None
    """Why it cannot be used at all."""


@dataclass(frozen=True, slots=True)
class Forks:
    """How a throw-away process came off that imported what ranks are forked with."""

    outcome: Literal["fit", "unfit", "failed", "ended", "hung"]
    """`unfit`: no rank may be forked from it; `ended`: the process did so by itself."""
    name: str = ""
    """What was being imported."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LockFolder:
    """The folder of the machine's device locks; the doctor does not make it."""

    path: str
    exists: bool = True
    problem: str | None = None
    """Why it cannot be used, to follow the path: ``is not a directory``."""
    filesystem: str | None = None
    """As in ``/proc/mounts``; None where nothing tells."""
    abandoned: int = 0
    """Sessions that have ended without withdrawing what they waited for."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All of it."""

    accel: str
    """The name in ``--accel``: ``auto``, ``none`` or a kind."""
    session: str
    """The kind of a session's devices, ``none`` where it has none."""
    devices: str
    """The session's devices in words."""
    ranks: int
    """How many ranks may run at once."""
    python: str
    versions: Mapping[str, str | None]
    """Of the packages that matter, by their names; None for one that is not installed."""
    torch: Torch | None
    nvidia: Nvidia
    kinds: tuple[Kind, ...]
    cuda_order: str | None
    """``CUDA_DEVICE_ORDER``."""
    forks: Forks | None
    """None where there is no torch to import."""
    locks: LockFolder
    shared_memory: int | None
    """Bytes that ``/dev/shm`` holds; None on a system that has none."""
    ignored: tuple[str, ...] = ()
    """Entry points of other packages that publish a kind under a name that they cannot have."""

    def kind(self, name: str) -> Kind | None:
        """The kind of this name, if it was looked at."""
        return next((kind for kind in self.kinds if kind.name == name), None)
