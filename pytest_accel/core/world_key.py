"""Computation of the key that decides which tests can run in the same world (`WorldKey`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pytest_accel.core.device import DeviceNeed, Share
from pytest_accel.core.requirement import RankNeed, Requirement

_SHARING_BACKENDS = {"gloo", "mpi"}


@dataclass(frozen=True, slots=True)
class WorldKey:
    """Key of a world: tests with equal keys can run in the same world, one after the other."""

    kind: str
    need: DeviceNeed | None
    """Devices to lease for the whole world; None: the ranks run on the CPU, without a lease."""
    ranks: int
    grouped: bool
    """True if the ranks form a distributed world; False: one process that only has devices."""
    backend: str | None = None
    init: bool = True
    devices_per_rank: int = 0
    visible: Literal["world", "rank"] = "world"
    env: tuple[tuple[str, str], ...] = ()
    fresh: bool = False
    launcher: str | None = None
    """Program that starts the ranks' processes; None: a fork server of the session forks them."""
    nodes: int = 1
    """Minimum number of nodes that the ranks must be on."""
    server: int = 0
    """Number of the fork server for a world that is not `grouped`."""

    @property
    def about(self) -> str:
        """Short description of the world, for display."""
        return f"{self.ranks} on {self.kind}" if self.grouped else self.kind

    def needs(self, nodes: Sequence[int]) -> dict[int, DeviceNeed]:
        """Return the devices to lease on each node; `nodes` has the node of each rank. Empty if no lease is needed."""
        counts = Counter(nodes)
        return {
            node: replace(
                self.need, count=ranks * self.devices_per_rank, sets=ranks if self.need.sets > 1 else self.need.sets
            )
            for node, ranks in counts.items()
            if self.need is not None
        }


class Traits(NamedTuple):
    """Properties of a kind of device that the key of a world depends on."""

    backend: str | None = None
    """Backend that the vendor names; None: torch's default."""
    ranks: bool = True
    """False if ranks of tests that name no kind use the CPU instead (`Vendor.ranks`)."""
    share: Share | None = None
    """Share of each device for tests that request none, from the session's options."""


def key_for(
    requirement: Requirement,
    session_kind: str | None,
    traits: Callable[[str], Traits] = lambda kind: Traits(),
    *,
    fresh: bool = False,
) -> WorldKey:
    """Return the key of the world that `requirement` needs.

    `session_kind` is the kind of the session's accelerators (None: it has none); `traits` returns the traits of a kind.
    """
    devices, ranks = requirement.devices, requirement.ranks
    fresh = fresh or requirement.fresh
    requested = (ranks.device if ranks else None) or (devices.kind if devices else None)
    if ranks is None:
        assert devices is not None
        kind = requested or session_kind or "none"
        own_need = replace(devices, share=devices.share or traits(kind).share)
        return WorldKey(kind, own_need, 1, grouped=False, devices_per_rank=devices.count, fresh=fresh)
    if session_kind is not None and devices is None and not traits(session_kind).ranks:
        session_kind = None
    # Ranks can run on the CPU, but devices that a mark requests are accelerators.
    kind = requested or session_kind or ("cpu" if devices is None else "none")
    leased = devices is not None or (kind != "cpu" if requested else session_kind is not None)
    per_rank = devices.count if devices else ranks.devices_per_rank
    need: DeviceNeed | None = None
    if leased:
        need = replace(devices or DeviceNeed(1), count=ranks.world_size * per_rank, kind=kind)
        share = need.share or traits(kind).share
        can_share = share is not None and _can_use_one_device(ranks, traits(kind).backend)
        need = replace(need, share=share, sets=ranks.world_size if can_share else 1)
    return WorldKey(
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
    """Return the names in ``cpu:gloo,cuda:nccl``, a `backend` of `torch.distributed.init_process_group`."""
    return [part.rpartition(":")[2].lower() for part in backend.split(",")] if backend else []


def _can_use_one_device(ranks: RankNeed, default: str | None) -> bool:
    """Return whether two ranks may use one device.

    NCCL and similar backends refuse that ("Duplicate GPU detected"). A test that creates its own process groups
    (``init=False``) is not restricted.
    """
    names = backend_names(ranks.backend or default)
    return not ranks.init or (bool(names) and set(names) <= _SHARING_BACKENDS)
