"""Data classes for the requirements in a test's marks, which are known at collection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_accel.core.device import DeviceNeed


@dataclass(frozen=True, slots=True)
class RankNeed:
    """Requirements of ``@pytest.mark.distributed``."""

    world_size: int
    nodes: int = 1
    """Minimum number of nodes that the ranks must be on."""
    backend: str | None = None
    """Backend of the process group; None: torch's default for the ranks' device."""
    device: str | None = None
    """Kind of device that the ranks run on; None: the session's accelerators if it has any, else ``cpu``."""
    devices_per_rank: int = 1
    init: bool = True
    visible: Literal["world", "rank"] = "world"
    env: tuple[tuple[str, str], ...] = ()
    launcher: str | None = None
    """Program that starts the ranks' processes; None: the plugin starts them."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """All requirements in a test's marks.

    `devices` describes the devices of one process (of each rank, if `ranks` is set too); None: the marks name no
    device. `ranks` is None for a test that runs in one process.
    """

    devices: DeviceNeed | None
    ranks: RankNeed | None
    timeout: float | None = None
    """Timeout of each phase in seconds; None: the session's."""
    fresh: bool = False
