"""Who gets what next: waiting requests and what is free in, grants out. Pure functions, no clock, no memory.

The rules, for requests taken in the order in which they arrived:

- A request is granted whole or not at all.
- A request that cannot be granted yet *claims* what it waits for, and requests behind it get only what is not
  claimed. It claims the free devices that it would take: all those among its candidates while they are fewer than it
  asked for, exactly as many as it asked for once there are enough. It claims slots only once its devices are
  complete, because until then it is devices that it waits for; what it then claims is its whole number of slots, or
  all that are free when they are fewer.
- Everything else may be passed on: devices that are no candidate of an earlier waiting request, devices beyond its
  count, slots of a request that still waits for devices.

So the first request in line only ever gains: a device of its candidates that becomes free stays with it, and so does
a slot once its devices are complete. It is granted at the latest when the leases that hold its candidates, and then
those that hold slots, have been given back once; the next one is then first in line: nobody starves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """`count` devices out of `candidates`, and `slots` ranks that may run on the CPU at once."""

    id: int
    candidates: tuple[str, ...]
    """Ids of the devices that would do, in the session's order."""
    count: int
    slots: int = 0
    ties: tuple[tuple[str, str, float], ...] = ()
    """How well pairs of candidates go together, where it differs. A wish for when there is a choice: nothing waits."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What one request gets: exactly what it asked for."""

    request: int
    devices: tuple[str, ...]
    """In the order of the request's candidates, which is the session's."""
    slots: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a request that cannot be granted lacks."""

    request: Request
    devices: bool
    slots: bool


def decide(waiting: Sequence[Request], free: Collection[str], free_slots: int) -> tuple[Grant, ...]:
    """The grants that are due now.

    `waiting` is in the order of arrival. The same state always gives the same grants, and when they have been carried
    out the next call gives none until something is released or asked for.
    """
    return tuple(step for step in _plan(waiting, free, free_slots) if isinstance(step, Grant))


def shortages(waiting: Sequence[Request], free: Collection[str], free_slots: int) -> tuple[Shortage, ...]:
    """What each request that :func:`decide` leaves waiting lacks, earlier claims counted, in the order of arrival."""
    return tuple(step for step in _plan(waiting, free, free_slots) if isinstance(step, Shortage))


def wanted(
    waiting: Sequence[Request],
    free: Collection[str],
    free_slots: int,
    held: Mapping[str, int],
    held_slots: Mapping[int, int],
) -> frozenset[int]:
    """The leases that hold something that a request needs which :func:`decide` leaves waiting.

    `held` says which lease holds a device, `held_slots` how many slots a lease holds. A request that lacks devices
    wants every lease that holds one of its candidates, whichever comes back first.
    """
    lacking = shortages(waiting, free, free_slots)
    devices = {device for shortage in lacking if shortage.devices for device in shortage.request.candidates}
    leases = {lease for device, lease in held.items() if device in devices}
    if any(shortage.slots for shortage in lacking):
        leases.update(lease for lease, slots in held_slots.items() if slots)
    return frozenset(leases)


def _plan(waiting: Sequence[Request], free: Collection[str], free_slots: int) -> Iterator[Grant | Shortage]:
    unclaimed = set(free)
    slots = free_slots
    for request in waiting:
        available = [device for device in request.candidates if device in unclaimed]
        picked = _pick(available, request)
        unclaimed.difference_update(picked)
        if len(picked) < request.count:
            yield Shortage(request, devices=True, slots=request.slots > slots)
        elif request.slots > slots:
            slots = 0
            yield Shortage(request, devices=False, slots=True)
        else:
            slots -= request.slots
            yield Grant(request.id, picked, request.slots)


def _pick(available: Sequence[str], request: Request) -> tuple[str, ...]:
    if len(available) <= request.count or request.count < 2 or not request.ties:
        return tuple(available[: request.count])
    weights = {frozenset((one, other)): weight for one, other, weight in request.ties}
    sets = [_grow(first, available, request.count, weights) for first in available]
    # The first of the best: those that come first in the session's order.
    chosen, _ = max(sets, key=lambda found: found[1])
    return tuple(device for device in available if device in chosen)


def _grow(
    first: str, available: Sequence[str], count: int, weights: Mapping[frozenset[str], float]
) -> tuple[list[str], float]:
    """`count` devices from `first` on, each the one that goes best with those before it, and how well they do."""
    chosen, total = [first], 0.0

    def bond(device: str) -> float:
        return sum(weights.get(frozenset((device, one)), 0.0) for one in chosen)

    while len(chosen) < count:
        best = max((device for device in available if device not in chosen), key=bond)
        total += bond(best)
        chosen.append(best)
    return chosen, total
