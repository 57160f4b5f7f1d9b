"""The policy: decides from the waiting requests and the free resources which requests are granted. Pure functions.

The rules, for requests in the order of their arrival:

- A request is granted in full or not at all.
- A request takes whole devices, or a number of parts of each. A device is granted whole only if no part is leased.
- A request that cannot be granted yet *claims* devices and slots (`_plan`), and later requests get only what is not
  claimed.
- Later requests may use the rest: devices that are no candidates of an earlier waiting request, devices beyond its
  count, and slots that it would need while it still waits for devices.

So the first request in the queue never loses ground: no part of a device that it claims is granted to others, and it
gives up a claimed device only for another with a larger free part. The same holds for slots once its devices are
complete. It is granted at the latest when the leases that hold its candidates, and then those that hold slots, have
been released once. Then the next request is the first in the queue, so no request starves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_accel.hardware.shares import WHOLE, with_parts


@dataclass(frozen=True, slots=True)
class Request:
    """A request for `count` devices out of `candidates`, and for `slots` ranks that may run on the CPU at once."""

    id: int
    candidates: tuple[str, ...]
    """Ids of the devices that satisfy the request, in the session's order."""
    count: int
    slots: int = 0
    ties: tuple[tuple[str, str, float], ...] = ()
    """Pairs of candidates, each with a weight that says how well they fit together; empty if all pairs are equal.

    Ties matter only if there is a choice: a request does not wait for devices that fit better.
    """
    parts: tuple[int, ...] = ()
    """Parts of each candidate that the request takes, out of `WHOLE`; empty if it takes whole devices.

    The parts are equal for all candidates, or less than `WHOLE` for each.
    """
    sets: int = 1
    """Number of sets of equal size that `count` is divided into. A device may be in several sets, but once in each."""

    def takes(self, device: str) -> int:
        """Return the parts that the request takes of `device`, one of its candidates."""
        return self.parts[self.candidates.index(device)] if self.parts else WHOLE


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use `devices`, and to run `slots` ranks on the CPU: what one request gets, in full."""

    id: int
    """The id of the request, which becomes the id of the lease."""
    devices: tuple[str, ...]
    """Devices set by set; within a set in the order of the request's candidates, which is the session's order. A device
    that is in two sets occurs twice."""
    slots: int
    parts: tuple[int, ...] = ()
    """Parts taken of each of `devices`, in the same order; empty for whole devices."""

    def takes(self) -> tuple[tuple[str, int], ...]:
        """Return pairs of each device and the parts of it that the lease has."""
        return with_parts(self.devices, self.parts)


@dataclass(frozen=True, slots=True)
class Shortage:
    """The resources that a request lacks, and therefore waits for."""

    request: Request
    devices: bool
    """True if the request lacks devices."""
    slots: bool
    """True if the request lacks slots."""
    claimed: frozenset[str] = frozenset()
    """The devices whose free parts are all kept for the request."""


def check_request(request: Request, slots: int) -> None:
    """Raise ValueError for a request that could not be granted even if all its candidates and `slots` were free."""
    count, sets = request.count, request.sets
    if sets < 1 or count % sets:
        raise ValueError(f"sets={sets}: must be a divisor of count={count}")
    if not all(1 <= taken <= WHOLE for taken in request.parts):
        raise ValueError(f"parts={list(request.parts)}: must be from 1 to {WHOLE} each")
    capacities = [WHOLE // request.takes(device) for device in request.candidates]
    if sum(min(sets, capacity) for capacity in capacities) < count or not 0 <= count // sets <= len(capacities):
        most = f"the number of candidates, {len(capacities)}" if sets == 1 else f"what {sets} sets have room for"
        raise ValueError(f"count={count}: must be from 0 to {most}")
    if not 0 <= request.slots <= slots:
        raise ValueError(f"slots={request.slots}: must be from 0 to the session's {slots}")
    if not count and not request.slots:
        raise ValueError("count=0 and slots=0: one of them must be at least 1")


def decide(waiting: Sequence[Request], free: Mapping[str, int], free_slots: int) -> tuple[Lease, ...]:
    """Return the leases that can be granted now.

    `waiting` is in the order of arrival, `free` has the free parts of each device. The result depends only on the
    arguments. After these leases have been granted, no other request can be granted until a lease is released or a
    request is added.
    """
    return tuple(step for step in _plan(waiting, free, free_slots) if isinstance(step, Lease))


def shortages(waiting: Sequence[Request], free: Mapping[str, int], free_slots: int) -> tuple[Shortage, ...]:
    """Return what each request that :func:`decide` leaves waiting lacks, in the order of arrival.

    Devices and slots that earlier requests claim count as not free.
    """
    return tuple(step for step in _plan(waiting, free, free_slots) if isinstance(step, Shortage))


def wanted(
    waiting: Sequence[Request], free: Mapping[str, int], free_slots: int, leases: Iterable[Lease]
) -> tuple[int, ...]:
    """Return the ids of the `leases` that hold a device or slot for which a request waits after :func:`decide`.

    A request that lacks devices wants every lease that holds one of its candidates; leases on devices that it claims
    come first.
    """
    lacking = shortages(waiting, free, free_slots)
    claimed = {device for shortage in lacking for device in shortage.claimed}
    devices = {device for shortage in lacking if shortage.devices for device in shortage.request.candidates}
    lacks_slots = any(shortage.slots for shortage in lacking)
    found = [lease for lease in leases if not devices.isdisjoint(lease.devices) or (lacks_slots and lease.slots)]
    found.sort(key=lambda lease: (claimed.isdisjoint(lease.devices), lease.id))
    return tuple(lease.id for lease in found)


def _plan(waiting: Sequence[Request], free: Mapping[str, int], free_slots: int) -> Iterator[Lease | Shortage]:
    """Yield the lease or the shortage of each waiting request, in the order of arrival."""
    unclaimed = dict(free)
    slots = free_slots
    for request in waiting:
        placed = _place(request, unclaimed)
        if placed is None:
            # Too few devices are free. Claim as many as the request needs, with all their free parts: otherwise later
            # requests could take each part that is returned, and this one would starve. Claim no slots before the
            # devices are complete, so that later requests use the slots meanwhile.
            claimed = _claim(request, unclaimed)
            unclaimed.update(dict.fromkeys(claimed, 0))
            yield Shortage(request, True, request.slots > slots, frozenset(claimed))
            continue
        for device, taken in placed:
            unclaimed[device] -= taken
        devices = tuple(device for device, _ in placed)
        if request.slots > slots:
            # The devices are complete, and stay claimed. All free slots are claimed too, since they are too few.
            slots = 0
            yield Shortage(request, False, True, frozenset(devices))
        else:
            slots -= request.slots
            parts = tuple(taken for _, taken in placed) if request.parts else ()
            yield Lease(request.id, devices, request.slots, parts)


def _place(request: Request, unclaimed: Mapping[str, int]) -> list[tuple[str, int]] | None:
    """Return the devices that `request` gets, each with the parts taken of it, or None if too few are free."""

    def left_over(device: str, left: int) -> float:
        return left - request.takes(device)

    def negative_capacity(device: str, left: int) -> float:
        return -(left // request.takes(device))

    # Best fit: take parts of the device that has least left afterwards, so that other devices stay whole.
    sets = _fill(request, unclaimed, left_over)
    if sets is None and request.sets > 1:
        # Several sets may fit only if each takes the devices with room for most of the sets that follow.
        sets = _fill(request, unclaimed, negative_capacity)
    if sets is None:
        return None
    order = {device: at for at, device in enumerate(request.candidates)}
    sets.sort(key=lambda one: [order[device] for device in one])
    return [(device, request.takes(device)) for one in sets for device in one]


def _fill(request: Request, unclaimed: Mapping[str, int], waste: Callable[[str, int], float]) -> list[list[str]] | None:
    """Return the devices of each set, choosing devices with the least ``waste(device, free parts)``, or None."""
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
    """Return the candidates with the largest free parts, as many as `request` would need if they were entirely free."""
    most_free = sorted(request.candidates, key=lambda device: -unclaimed.get(device, 0))
    claimed: list[str] = []
    capacity = 0
    for device in most_free:
        # The devices of a set must differ, however many parts a single device has free.
        if capacity >= request.count and len(claimed) >= request.count // request.sets:
            break
        capacity += min(request.sets, WHOLE // request.takes(device))
        claimed.append(device)
    return claimed


def _pick(available: Sequence[str], request: Request) -> list[str]:
    if len(available) <= request.count or request.count < 2 or not request.ties:
        return list(available[: request.count])
    weights = {frozenset((one, other)): weight for one, other, weight in request.ties}
    sets = [_grow(first, available, request.count, weights) for first in available]
    # max() returns the first of several equally good sets: the set that comes first in the session's order.
    chosen, _ = max(sets, key=lambda found: found[1])
    return [device for device in available if device in chosen]


def _grow(
    first: str, available: Sequence[str], count: int, weights: Mapping[frozenset[str], float]
) -> tuple[list[str], float]:
    """Grow a set of `count` devices from `first`, adding the best fitting device each time; return set and weight."""
    chosen, total = [first], 0.0

    def weight_with_chosen(device: str) -> float:
        return sum(weights.get(frozenset((device, one)), 0.0) for one in chosen)

    while len(chosen) < count:
        best = max((device for device in available if device not in chosen), key=weight_with_chosen)
        total += weight_with_chosen(best)
        chosen.append(best)
    return chosen, total
