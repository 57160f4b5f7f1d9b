"""The devices of a machine that a cluster has reserved for a world, as a mask names them."""

from __future__ import annotations

import os
from dataclasses import replace

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.kinds import PJRT_DEVICE
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import shortfall
from pytest_accel.leases.shared_folder import PlaceError


def shown_devices(machine: Machine, kind: str, mask: str, need: DeviceNeed) -> frozenset[str]:
    """Return the ids of the devices of this `machine` that `mask` shows, as a process without a mask numbers them.

    Raise :class:`PlaceError` if they do not suffice for `need`.
    """
    vendor, inventory = machine.vendor(kind), machine.of(kind)
    variable = next((name for name in vendor.mask_variables if name != PJRT_DEVICE), None)
    if variable is None:
        raise PlaceError(f"{kind} devices have no mask, by which a cluster could name them")
    # The other variables may set the order in which the mask counts devices (CUDA_DEVICE_ORDER).
    environ = {name: value for name, value in os.environ.items() if name not in vendor.mask_variables}
    names = frozenset(device.id for device in vendor.visible(vendor.discover(), {**environ, variable: mask}))
    shown = replace(inventory, devices=tuple(device for device in inventory.devices if device.id in names))
    if (missing := shortfall(need, shown)) is not None:
        raise PlaceError(f"the cluster has reserved {variable}={mask}, but the test {missing}")
    return names
