"""The placement of a world's ranks on the machines of a session, and why there may be none. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import Resources, missing_devices


@dataclass(frozen=True, slots=True)
class RankMachine:
    """One machine of a session."""

    name: str
    """The name for messages to the user."""
    address: str
    """The address at which other machines reach it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The machines of the processes that a launcher has started, the driver's first."""

    machines: tuple[RankMachine, ...]
    ranks: int
    """The maximum number of ranks of a world on each machine."""

    @property
    def capacity(self) -> int:
        """The maximum number of ranks of a world."""
        return self.ranks * len(self.machines)

    def machines_of(self, ranks: int, machines: int) -> list[int]:
        """Return the machine of each rank of a world for which there are enough machines (:func:`missing_place`).

        The world is on as few machines as possible, but at least `machines`, beginning with the driver's. Ranks are
        distributed evenly over the machines, and the ranks of one machine have consecutive numbers.
        """
        count = max(machines, -(-ranks // self.ranks))
        each, rest = divmod(ranks, count)
        return [machine for machine in range(count) for _ in range(each + (machine < rest))]


def missing_place(key: WorldKey, layout: Layout, launcher: str, resources: Resources) -> str | None:
    """Return why the processes of `launcher` can never run a group of ranks of `key`, or None if they can.

    `layout` has their machines.
    """
    if key.ranks > layout.capacity:
        return f"needs {key.ranks} ranks; {launcher} has started {layout.capacity}"
    if key.machines > len(layout.machines):
        return f"needs {key.machines} machines; {launcher} has started ranks on {len(layout.machines)}"
    if key.launcher is not None:
        return f"its ranks are started by {key.launcher}, which a session under {launcher} does not do"
    machines = layout.machines_of(key.ranks, key.machines)
    if key.need is None or not any(machines):
        return missing_devices(key, resources)
    # All machines count as equal to this one, which has the most ranks. The agent of a machine with fewer devices
    # refuses their lease.
    missing = missing_devices(replace(key, need=key.needs(machines)[0]), resources)
    return None if missing is None else f"{missing} (on {layout.machines[0].name})"
