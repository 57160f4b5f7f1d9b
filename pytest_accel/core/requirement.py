"""What a test's marks ask for: pure data, known at collection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_accel.core.device import DeviceNeed


@dataclass(frozen=True, slots=True)
class RankNeed:
    """What ``@pytest.mark.distributed`` asks for."""

    world_size: int
    nodes: int = 1
    """On how many machines the ranks must be, at least."""
    backend: str | None = None
    """None: torch's default for the ranks' device."""
    device: str | None = None
    """The kind that the ranks run on; None: the session's accelerators when it has any, else ``cpu``."""
    devices_per_rank: int = 1
    init: bool = True
    visible: Literal["world", "rank"] = "world"
    env: tuple[tuple[str, str], ...] = ()
    launcher: str | None = None
    """The program that starts the ranks' processes; None: the plugin does."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """Everything that a test's marks ask for.

    `devices` describes the devices of one process (of each rank, where `ranks` is set too); None: the marks name no
    device. `ranks` is None for a test that one process runs.
    """

    devices: DeviceNeed | None
    ranks: RankNeed | None
    timeout: float | None = None
    """Seconds for each phase; None: the session's."""
    fresh: bool = False
