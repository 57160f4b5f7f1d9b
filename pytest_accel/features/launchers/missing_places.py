"""Why the processes of a launcher can never run the ranks of a test. A pure function."""

from __future__ import annotations

from dataclasses import replace

from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import Resources, missing_devices
from pytest_accel.features.launchers.placement import Layout


def missing_place(key: WorldKey, layout: Layout, launcher: str, resources: Resources) -> str | None:
    """Return why the processes of `launcher` can never run a group of ranks of `key`, or None if they can.

    `layout` has their machines.
    """
    if (shortage := layout.shortage(key.ranks, key.machines, launcher)) is not None:
        return shortage
    if key.launcher is not None:
        return f"its ranks are started by {key.launcher}, which a session under {launcher} does not do"
    machines = layout.machines_of(key.ranks, key.machines)
    if key.need is None or not any(machines):
        return missing_devices(key, resources)
    # All machines count as equal to this one, which has the most ranks. The agent of a machine with fewer devices
    # refuses their lease.
    missing = missing_devices(replace(key, need=key.needs(machines)[0]), resources)
    return None if missing is None else f"{missing} (on {layout.names[0]})"
