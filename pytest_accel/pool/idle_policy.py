"""The policy for idle worlds: decides which of them end, so that others get what they hold. A pure function.

A world is kept warm, since the next test of its key then starts within milliseconds. The price is what it holds: its
devices, and the memory of its processes. A world whose devices are wanted ends at once; that is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

IDLE_LIMIT = 30.0
"""Seconds for which an idle world that holds devices is kept; one without devices has no limit.

Within a session, tests that need the devices end it at once, and sessions of this plugin see that another waits.
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
    """Number of its ranks on this machine."""
    since: float
    """Time at which it became idle, in seconds of the clock that gives `now`."""
    devices: bool
    """True if it holds devices of this session's machines, or a place on a cluster."""


def to_retire(worlds: Iterable[IdleWorld], now: float, kept_ranks: int = KEPT_RANKS) -> list[tuple[int, str]]:
    """Return the numbers of the idle `worlds` that end now, each with the reason, the longest idle first.

    A world ends if it has held devices for more than `IDLE_LIMIT`, or if more than `kept_ranks` ranks are idle. The
    world that became idle last is not counted among these, however many ranks it has: the next test may be like its
    last one.
    """
    idle = sorted(worlds, key=lambda world: world.since)
    ending = {
        one.number: f"idle for {IDLE_LIMIT:.0f} s" for one in idle if one.devices and now - one.since > IDLE_LIMIT
    }
    here = [world for world in idle if world.number not in ending]
    excess = sum(world.ranks for world in here) - kept_ranks
    for world in here[:-1]:
        if excess > 0:
            excess -= world.ranks
            ending[world.number] = "more ranks were idle than are kept"
    return [(world.number, ending[world.number]) for world in idle if world.number in ending]
