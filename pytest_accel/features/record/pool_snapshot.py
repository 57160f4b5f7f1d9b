"""The present state of a pool, for those who watch a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pytest_accel.diagnostics.collectives import Record
from pytest_accel.diagnostics.diagnosis import Examiner, collectives
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.pooled_world import WorldState


class PoolSnapshot(NamedTuple):
    """The present state of a pool."""

    waiting: list[tuple[int, str, float]]
    """Each request for a world that has not been answered, with its test and the time of the request."""
    drivers: list[tuple[int, str]]
    """Each world that a driver has or will get, with the test for which it was requested."""
    used: int
    """Number of the devices of these worlds."""
    devices: int
    """Number of all devices that are known."""


def snapshot(pool: Pool) -> PoolSnapshot:
    """Return the present state, in the pool's thread."""
    waiting = [(one.id, one.demand.holder.test, one.since) for one in pool.requests.values() if one.demand.key.ranks]
    worlds = [one for one in pool.worlds.values() if one.state in (WorldState.STARTING, WorldState.IN_USE)]
    used = {
        (world.spec.machine_of(rank), device.id)
        for world in worlds
        for rank in range(world.spec.ranks)
        for device in world.spec.devices_of(rank)
    }
    drivers = [
        (one.spec.world, one.request.demand.holder.test) for one in worlds if one.request is not None and one.spec.ranks
    ]
    return PoolSnapshot(waiting, drivers, len(used), len(pool.devices))


class Progress(NamedTuple):
    """The present activity of the ranks of a running test, as far as it is known without disturbing them."""

    places: Mapping[int, str] = {}
    """The places in the code, by rank."""
    finished: Sequence[int] = ()
    """The ranks that have finished the test."""
    records: Mapping[int, Record] = {}
    """The collectives, by rank."""


def progress(pool: Pool, number: int) -> Progress:
    """Return what the living ranks of a world are doing. This does not disturb them, and may take a second.

    It takes no stacks: the signal for them would end a native call early, such as ``sleep(3)``. The signal for records
    does not.
    """
    world = pool.call(pool.worlds.get, number)
    if world is None or world.state is not WorldState.IN_USE:
        return Progress()
    records = Examiner(pool.directory, world.spec).records(pool.call(lambda: world.alive))
    places = {rank: record.place for rank, record in records.items() if record.place and not record.finished}
    return Progress(places, [rank for rank, record in records.items() if record.finished], collectives(records))
