"""The events of the pool for the session's record, made from the pool's own objects. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_accel.core.device import Device, Share
from pytest_accel.core.record_events import DeviceFound, RankPlace, WorldStarting
from pytest_accel.core.world_spec import WorldSpec


def device_found(device: Device, machine: int) -> DeviceFound:
    """Return the event for a device of a machine."""
    return DeviceFound(device.id, device.kind, device.index, device.name, machine, device.memory)


def world_starting(spec: WorldSpec, request: int) -> WorldStarting:
    """Return the event for a world that is started for the request with the number `request`."""
    ranks = []
    for rank in range(spec.ranks):
        devices = spec.devices_of(rank)
        ids = tuple(device.id for device in devices)
        ranks.append(RankPlace(spec.machine_of(rank), ids, _fraction(spec.share, devices)))
    return WorldStarting(spec.world, request, spec.key.about, tuple(ranks))


def _fraction(share: Share | None, devices: Sequence[Device]) -> float:
    """Return the fraction of each of `devices` that `share` is; 1 if unknown."""
    if share is None:
        return 1.0
    if share.fraction is not None:
        return share.fraction
    memory = min((device.memory or 0 for device in devices), default=0)
    return min(1.0, share.bytes / memory) if share.bytes and memory else 1.0
