"""The shape of a world: what a test needs of it, and what makes a warm one fit for the next test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pytest_accel.hardware.device import Device, DeviceNeed
from pytest_accel.markers import Requirement
from pytest_accel.worlds.messages import WorldSpec


@dataclass(frozen=True, slots=True)
class WorldShape:
    """Two tests of one shape can share a world, one after the other."""

    kind: str
    need: DeviceNeed | None
    """All that is leased for the world; None: ranks on the CPU, which need no lease."""
    ranks: int
    grouped: bool
    """Whether the ranks form a distributed world; False: one process that only has devices."""
    backend: str | None = None
    init: bool = True
    devices_per_rank: int = 0
    visible: Literal["world", "rank"] = "world"
    env: tuple[tuple[str, str], ...] = ()
    fresh: bool = False

    @property
    def about(self) -> str:
        """The world in a few words."""
        return f"{self.ranks} on {self.kind}" if self.grouped else self.kind

    def spec(self, world: int, devices: tuple[Device, ...], kind_argument: str | None) -> WorldSpec:
        """World number `world` of this shape on `devices`."""
        return WorldSpec(
            world=world,
            ranks=self.ranks,
            grouped=self.grouped,
            backend=self.backend,
            init=self.init,
            kind=self.kind,
            kind_argument=kind_argument,
            devices=devices,
            devices_per_rank=self.devices_per_rank,
            visible=self.visible,
            env=self.env,
        )


def shape_of(requirement: Requirement, session_kind: str | None, *, fresh: bool = False) -> WorldShape:
    """The world that `requirement` asks for, where the session's accelerators are of `session_kind` (None: none)."""
    devices, ranks = requirement.devices, requirement.ranks
    fresh = fresh or requirement.fresh
    asked = (ranks.device if ranks else None) or (devices.kind if devices else None)
    if ranks is None:
        assert devices is not None
        kind = asked or session_kind or "none"
        return WorldShape(kind, devices, 1, grouped=False, devices_per_rank=devices.count, fresh=fresh)
    kind = asked or session_kind or "cpu"
    leased = devices is not None or (kind != "cpu" if asked else session_kind is not None)
    per_rank = devices.count if devices else ranks.devices_per_rank
    need = replace(devices or DeviceNeed(1), count=ranks.world_size * per_rank, kind=kind) if leased else None
    return WorldShape(
        kind,
        need,
        ranks.world_size,
        grouped=True,
        backend=ranks.backend,
        init=ranks.init,
        devices_per_rank=per_rank if need else 0,
        visible=ranks.visible,
        env=ranks.env,
        fresh=fresh,
    )
