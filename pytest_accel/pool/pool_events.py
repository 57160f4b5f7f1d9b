"""The fields of the event of a world that starts (`core/record_events.py`). Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_accel.core.device import Device, Share
from pytest_accel.messages.world_spec import WorldSpec


def world_starting(spec: WorldSpec, request: int) -> dict[str, Any]:
    """Return the fields of the event for a world that is started for the request with the number `request`."""
    places = []
    for rank in range(spec.ranks):
        devices = spec.devices_of(rank)
        ids = [device.id for device in devices]
        places.append({"machine": spec.machine_of(rank), "devices": ids, "share": _fraction(spec.share, devices)})
    return {"world": spec.world, "request": request, "about": spec.key.about, "places": places}


def _fraction(share: Share | None, devices: Sequence[Device]) -> float:
    """Return the fraction of each of `devices` that `share` is; 1 if unknown."""
    if share is None:
        return 1.0
    if share.fraction is not None:
        return share.fraction
    memory = min((device.memory or 0 for device in devices), default=0)
    return min(1.0, share.bytes / memory) if share.bytes and memory else 1.0
