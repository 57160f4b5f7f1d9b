"""The policy for idle worlds: decides which of them end, so that others get what they hold. A pure function.

A world is kept warm, since the next test of its key then starts within milliseconds. The price is what it holds: its
devices, its place on a cluster, and the memory of its processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

IDLE_LIMIT = 30.0
"""Seconds for which an idle world that holds devices is kept; one without devices has no limit.

Within a session, tests that need the devices end it at once, and sessions of this plugin publish what they wait for.
The limit is for all others, which only see the memory in use: half a minute is longer than the pauses between tests of
one key, and short enough for somebody who looks for a free device.
"""
KEPT_RANKS = 16
"""Number of idle ranks to keep; with more than eight CPU slots the pool keeps two for each slot.

Each has a process with torch in it: some 100 MB that it does not share.
"""
WANTED = "another request waits for its devices"


@dataclass(frozen=True, slots=True)
class IdleWorld:
    """A world that runs no test."""

    number: int
    ranks: int
    since: float
    """Time at which it became idle, in seconds of the clock that gives `now`."""
    devices: bool
    """True if it holds devices of this session's machines, or a place on a cluster."""
    room: int = 0
    """Number of devices, or else of ranks, in its place on a cluster; 0: it has no place."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The needs of waiting requests, of this session or of others, that idle worlds could meet."""

    worlds: frozenset[int] = frozenset()
    """The numbers of the worlds whose devices a request waits for."""
    room: int = 0
    """The number of devices, or else of ranks, that a request needs in a place on the cluster."""


def to_retire(
    worlds: Iterable[IdleWorld], wanted: Wanted, now: float, kept_ranks: int = KEPT_RANKS
) -> list[tuple[int, str]]:
    """Return the numbers of the idle `worlds` that end now, each with the reason, the longest idle first.

    A world ends if its devices are wanted, if its place is needed for the room that is wanted, if it has held devices
    for more than `IDLE_LIMIT`, or if more than `kept_ranks` ranks without a place are idle. The world that became idle
    last is not counted among these, however many ranks it has: the next test may be like its last one.
    """
    idle = sorted(worlds, key=lambda world: world.since)
    ending: dict[int, str] = {}
    room = wanted.room
    for world in idle:
        if world.number in wanted.worlds:
            ending[world.number] = WANTED
        elif world.room and room > 0:
            room -= world.room
            ending[world.number] = WANTED
        elif world.devices and now - world.since > IDLE_LIMIT:
            ending[world.number] = f"idle for {IDLE_LIMIT:.0f} s"
    here = [world for world in idle if not world.room and world.number not in ending]
    excess = sum(world.ranks for world in here) - kept_ranks
    for world in here[:-1]:
        if excess > 0:
            excess -= world.ranks
            ending[world.number] = "more ranks were idle than are kept"
    return [(world.number, ending[world.number]) for world in idle if world.number in ending]
