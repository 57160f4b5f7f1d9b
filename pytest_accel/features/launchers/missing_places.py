"""Why the processes of a launcher can never run the ranks of a test. A pure function."""

from __future__ import annotations

from collections.abc import Callable

from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import Resources, missing_devices
from pytest_accel.features.launchers.placement import Layout
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.hardware.matching import shortfall


def missing_place(
    key: WorldKey, layout: Layout, launcher: str, resources: Resources, remote: Callable[[int], Inventory | str]
) -> str | None:
    """Return why the processes of `launcher` can never run a group of ranks of `key`, or None if they can.

    `layout` has their machines. `remote` returns the devices of another machine, by its number, or why they cannot be
    looked up.
    """
    if (shortage := layout.shortage(key.ranks, key.machines, launcher)) is not None:
        return shortage
    if key.launcher is not None:
        return f"its ranks are started by {key.launcher}, which a session under {launcher} does not do"
    machines = layout.machines_of(key.ranks, key.machines)
    if key.need is None or not any(machines):
        return missing_devices(key, resources)
    if 0 not in machines:
        return f"needs {key.ranks} ranks with devices; rank 0's machine has too few ranks to be among theirs"
    for machine, need in key.needs(machines).items():
        inventory = remote(machine) if machine else resources.inventory(key.kind)
        if isinstance(inventory, str):
            return inventory
        if (missing := shortfall(need, inventory)) is not None:
            return f"{missing} (on {layout.names[machine]})"
    return None
