"""Who gets what next: waiting requests and what is free in, grants out. Pure functions, no clock, no memory.

The rules, for requests taken in the order in which they arrived:

- A request is granted whole or not at all.
- A request takes whole devices, or a number of parts of each. Parts go where they leave least over (best fit), so that
  devices stay whole for those who need them so; a whole device is one of which nobody has a part.
- A request that cannot be granted yet *claims* what it waits for, and requests behind it get only what is not
  claimed. It claims the devices that it would take: exactly those once there are enough, and before that as many as
  it needs of those among its candidates of which most is free, with all that is free of them. It claims slots only
  once its devices are complete, because until then it is devices that it waits for; what it then claims is its whole
  number of slots, or all that are free when they are fewer.
- Everything else may be passed on: devices that are no candidate of an earlier waiting request, devices beyond its
  count, slots of a request that still waits for devices.

So the first request in line only ever gains: nothing is added to a device that it claims, and it lets go of one only
for another of which more is free; and so with slots once its devices are complete. It is granted at the latest when the
leases that hold its candidates, and then those that hold slots, have been given back once; the next one is then first
in line: nobody starves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_accel.hardware.shares import WHOLE


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
    parts: tuple[int, ...] = ()
    """What it takes of each candidate, of `WHOLE`; empty: all. The same for all, or none of them whole."""
    sets: int = 1
    """`count` is that of so many sets of equal size. A set has no device twice; several may have one in common."""

    def takes(self, device: str) -> int:
        """The parts that it takes of one of its candidates."""
        return self.parts[self.candidates.index(device)] if self.parts else WHOLE


@dataclass(frozen=True, slots=True)
class Grant:
    """What one request gets: exactly what it asked for."""

    request: int
    devices: tuple[str, ...]
    """Set by set; within each in the order of the request's candidates, which is the session's."""
    slots: int
    parts: tuple[int, ...] = ()
    """What is taken of each of `devices`, one for one; empty: all."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a request that cannot be granted lacks."""

    request: Request
    devices: bool
    slots: bool
    claimed: frozenset[str] = frozenset()
    """The devices that are kept for it, as far as they are free."""


def check(request: Request, slots: int) -> None:
    """Raise ValueError for a request that could never be granted by one who has all its candidates and `slots`."""
    count, sets = request.count, request.sets
    if sets < 1 or count % sets:
        raise ValueError(f"sets={sets}: must be a divisor of count={count}")
    if not all(1 <= taken <= WHOLE for taken in request.parts):
        raise ValueError(f"parts={list(request.parts)}: must be from 1 to {WHOLE} each")
    places = [WHOLE // request.takes(device) for device in request.candidates]
    if sum(min(sets, one) for one in places) < count or not 0 <= count // sets <= len(places):
        most = f"the number of candidates, {len(places)}" if sets == 1 else f"what {sets} sets find room for"
        raise ValueError(f"count={count}: must be from 0 to {most}")
    if not 0 <= request.slots <= slots:
        raise ValueError(f"slots={request.slots}: must be from 0 to the session's {slots}")
    if not count and not request.slots:
        raise ValueError("count=0 and slots=0: one of them must be at least 1")


def decide(waiting: Sequence[Request], free: Mapping[str, int], free_slots: int) -> tuple[Grant, ...]:
    """The grants that are due now.

    `waiting` is in the order of arrival, `free` the parts of each device that nobody has. The same state always gives
    the same grants, and when they have been carried out the next call gives none until something is released or asked
    for.
    """
    return tuple(step for step in _plan(waiting, free, free_slots) if isinstance(step, Grant))


def shortages(waiting: Sequence[Request], free: Mapping[str, int], free_slots: int) -> tuple[Shortage, ...]:
    """What each request that :func:`decide` leaves waiting lacks, earlier claims counted, in the order of arrival."""
    return tuple(step for step in _plan(waiting, free, free_slots) if isinstance(step, Shortage))


def wanted(
    waiting: Sequence[Request],
    free: Mapping[str, int],
    free_slots: int,
    held: Mapping[int, Collection[str]],
    held_slots: Mapping[int, int],
) -> tuple[int, ...]:
    """The leases that hold something that a request needs which :func:`decide` leaves waiting.

    `held` says which devices a lease holds, `held_slots` how many slots. A request that lacks devices wants every lease
    that holds one of its candidates, whichever comes back first; those on devices that it claims stand before others.
    """
    lacking = shortages(waiting, free, free_slots)
    claimed = {device for shortage in lacking for device in shortage.claimed}
    devices = {device for shortage in lacking if shortage.devices for device in shortage.request.candidates}
    leases = {lease for lease, those in held.items() if not devices.isdisjoint(those)}
    if any(shortage.slots for shortage in lacking):
        leases.update(lease for lease, slots in held_slots.items() if slots)
    return tuple(sorted(leases, key=lambda lease: (claimed.isdisjoint(held.get(lease, ())), lease)))


def _plan(waiting: Sequence[Request], free: Mapping[str, int], free_slots: int) -> Iterator[Grant | Shortage]:
    unclaimed = dict(free)
    slots = free_slots
    for request in waiting:
        placed = _place(request, unclaimed)
        if placed is None:
            claimed = _claim(request, unclaimed)
            unclaimed.update(dict.fromkeys(claimed, 0))
            yield Shortage(request, True, request.slots > slots, frozenset(claimed))
            continue
        for device, taken in placed:
            unclaimed[device] -= taken
        devices = tuple(device for device, _ in placed)
        if request.slots > slots:
            slots = 0
            yield Shortage(request, False, True, frozenset(devices))
        else:
            slots -= request.slots
            parts = tuple(taken for _, taken in placed) if request.parts else ()
            yield Grant(request.id, devices, request.slots, parts)


def _place(request: Request, unclaimed: Mapping[str, int]) -> list[tuple[str, int]] | None:
    """A device and the parts of it that are taken for each that `request` asks for; None where they are too few."""

    def left_over(device: str, left: int) -> float:
        return left - request.takes(device)

    def fewest_places(device: str, left: int) -> float:
        return -(left // request.takes(device))

    sets = _fill(request, unclaimed, left_over)
    if sets is None and request.sets > 1:
        # Sets of several devices may fit only if each takes the devices that have room for most of those to come.
        sets = _fill(request, unclaimed, fewest_places)
    if sets is None:
        return None
    order = {device: at for at, device in enumerate(request.candidates)}
    sets.sort(key=lambda one: [order[device] for device in one])
    return [(device, request.takes(device)) for one in sets for device in one]


def _fill(request: Request, unclaimed: Mapping[str, int], waste: Callable[[str, int], float]) -> list[list[str]] | None:
    """The devices of each set, those first of which `waste` (of a device and what is left of it) is least."""
    left = {device: unclaimed.get(device, 0) for device in request.candidates}
    size = request.count // request.sets
    sets: list[list[str]] = []
    for _ in range(request.sets):
        fitting = [device for device in request.candidates if left[device] >= request.takes(device)]
        if len(fitting) < size:
            return None
        if request.parts:
            best = sorted(fitting, key=lambda device: waste(device, left[device]))[:size]
            sets.append([device for device in fitting if device in best])
        else:
            sets.append(_pick(fitting, request))
        for device in sets[-1]:
            left[device] -= request.takes(device)
    return sets


def _claim(request: Request, unclaimed: Mapping[str, int]) -> list[str]:
    """As many devices as `request` needs at most when they are empty, those first of which most is free."""
    most_free = sorted(request.candidates, key=lambda device: -unclaimed.get(device, 0))
    claimed: list[str] = []
    places = 0
    for device in most_free:
        if places >= request.count and len(claimed) >= request.count // request.sets:
            break
        places += min(request.sets, WHOLE // request.takes(device))
        claimed.append(device)
    return claimed


def _pick(available: Sequence[str], request: Request) -> list[str]:
    if len(available) <= request.count or request.count < 2 or not request.ties:
        return list(available[: request.count])
    weights = {frozenset((one, other)): weight for one, other, weight in request.ties}
    sets = [_grow(first, available, request.count, weights) for first in available]
    # The first of the best: those that come first in the session's order.
    chosen, _ = max(sets, key=lambda found: found[1])
    return [device for device in available if device in chosen]


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
