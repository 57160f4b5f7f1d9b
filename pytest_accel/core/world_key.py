"""The shape of a world: what a test needs of it, and what makes a warm one fit for the next test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pytest_accel.core.device import Device, DeviceNeed, Share
from pytest_accel.core.messages import WorldSpec
from pytest_accel.core.requirement import RankNeed, Requirement

_ON_ONE_DEVICE = {"gloo", "mpi"}


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
    launcher: str | None = None
    """The program that starts the ranks' processes; None: they come from a fork server of the session's."""
    nodes: int = 1
    """On how many machines the ranks must be, at least."""
    server: int = 0
    """The fork server that a world without a group comes from."""

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
            share=self.need.share if self.need else None,
        )

    def needs(self, nodes: Sequence[int]) -> dict[int, DeviceNeed]:
        """What is leased on each machine for ranks that are on `nodes`, by rank; nothing where no lease is needed."""
        counts = Counter(nodes)
        return {
            node: replace(
                self.need, count=ranks * self.devices_per_rank, sets=ranks if self.need.sets > 1 else self.need.sets
            )
            for node, ranks in counts.items()
            if self.need is not None
        }


class Traits(NamedTuple):
    """What the shape of a world owes to the kind of its devices."""

    backend: str | None = None
    """The vendor's own backend; None: the one that torch names."""
    ranks: bool = True
    """Whether ranks run on it that name no kind."""
    share: Share | None = None
    """Of each device for a test that asks for none: the session's."""


def shape_of(
    requirement: Requirement,
    session_kind: str | None,
    traits: Callable[[str], Traits] = lambda kind: Traits(),
    *,
    fresh: bool = False,
) -> WorldShape:
    """The world that `requirement` asks for, where the session's accelerators are of `session_kind` (None: none).

    `traits` are those of each kind of device.
    """
    devices, ranks = requirement.devices, requirement.ranks
    fresh = fresh or requirement.fresh
    asked = (ranks.device if ranks else None) or (devices.kind if devices else None)
    if ranks is None:
        assert devices is not None
        kind = asked or session_kind or "none"
        alone = replace(devices, share=devices.share or traits(kind).share)
        return WorldShape(kind, alone, 1, grouped=False, devices_per_rank=devices.count, fresh=fresh)
    if session_kind is not None and devices is None and not traits(session_kind).ranks:
        session_kind = None
    # Ranks make do with the CPU; devices that a test asks for by a mark are accelerators.
    kind = asked or session_kind or ("cpu" if devices is None else "none")
    leased = devices is not None or (kind != "cpu" if asked else session_kind is not None)
    per_rank = devices.count if devices else ranks.devices_per_rank
    need: DeviceNeed | None = None
    if leased:
        need = replace(devices or DeviceNeed(1), count=ranks.world_size * per_rank, kind=kind)
        share = need.share or traits(kind).share
        together = share is not None and _may_be_on_one_device(ranks, traits(kind).backend)
        need = replace(need, share=share, sets=ranks.world_size if together else 1)
    return WorldShape(
        kind,
        need,
        ranks.world_size,
        grouped=True,
        backend=ranks.backend,
        init=ranks.init,
        devices_per_rank=per_rank if leased else 0,
        visible=ranks.visible,
        env=ranks.env,
        fresh=fresh,
        launcher=ranks.launcher,
        nodes=ranks.nodes,
    )


def backend_names(backend: str | None) -> list[str]:
    """Those of ``cpu:gloo,cuda:nccl``, which is `torch.distributed.init_process_group`'s form."""
    return [part.rpartition(":")[2].lower() for part in backend.split(",")] if backend else []


def _may_be_on_one_device(ranks: RankNeed, default: str | None) -> bool:
    """Whether two ranks can use one device: NCCL refuses that ("Duplicate GPU detected"), as others of its kind do.

    A test that makes its own groups knows what it does.
    """
    names = backend_names(ranks.backend or default)
    return not ranks.init or (bool(names) and set(names) <= _ON_ONE_DEVICE)
