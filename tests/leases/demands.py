"""Demands for worlds, and the leases of sessions on simulated devices, as tests and their programs make them."""

from __future__ import annotations

from collections.abc import Callable

from pytest_accel.core.device import DeviceNeed, Share
from pytest_accel.core.world_key import WorldKey
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.demand import Holder, WorldDemand
from pytest_accel.leases.leases import Leases


def devices(count: int, test: str = "test_x.py::test_one", *, share: float | None = None, sets: int = 1) -> WorldDemand:
    """Return a demand for `count` simulated devices, or for a share of each, for `sets` ranks."""
    need = DeviceNeed(count, "sim", share=None if share is None else Share(fraction=share), sets=sets)
    key = WorldKey("sim", need, sets, grouped=sets > 1, devices_per_rank=count // sets)
    return WorldDemand(key, Holder.here(test))


def slots(count: int, test: str = "test_x.py::test_one") -> WorldDemand:
    """Return a demand for `count` CPU slots."""
    return WorldDemand(WorldKey("cpu", None, count, grouped=True), Holder.here(test))


def session(
    accel: str = "sim:4,shared",
    *,
    slots: int = 4,
    on_wanted: Callable[[], object] = lambda: None,
) -> Leases:
    """Return the leases of a session with the devices `accel`. Its lock folder is that of the environment."""
    return Leases(Machine(accel), slots, on_wanted, waits_for_busy=False)
