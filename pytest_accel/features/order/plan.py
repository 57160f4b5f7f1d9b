"""The plan: chooses from the remaining tests, the running tests and the free devices the test that starts next.

These are pure functions without a clock. The rules:

- Tests that take a larger fraction of their candidate devices start first. So freed devices are never too few for the
  next test, and the run ends with small tests, which fill all devices.
- A test that takes about as long as everything that remains is *urgent*. It starts before larger tests, except those
  that cannot run beside it: they would have to wait for its end, and start first.
- Tests that may take many times their expected time start from the smallest to the largest, so that most of them have
  started, and the long ones are known, while enough other tests remain to run beside these. Tests that take more than
  half of the devices are excepted: they cannot run side by side anyway. The rule does not apply if workers are
  scarce, because a worker is then better used by a large test.
- The first test that does not fit reserves the devices that it waits for. It starts at the latest when, by the expected
  times, enough running tests have ended. Until then other tests get devices that it will not need, or start only if
  they are expected to end in time.
- Tests that need no device run on workers that would otherwise wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request, decide

URGENT = 0.7
"""A test is urgent if it takes at least this fraction of the lower bound of the time for everything that remains."""
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that a test takes while it runs."""

    requests: tuple[Request, ...] = ()
    """The requests of its world and of its driver; none: only a worker."""
    size: float = 0.0
    """Fraction of its candidate devices, or of a named resource, that the test takes, from 0 to 1."""
    devices: float = 0.0
    """Number of devices that its world takes, by the first of the requests; parts count as fractions."""

    @property
    def candidates(self) -> tuple[str, ...]:
        """The devices from which its world gets some."""
        return self.requests[0].candidates if self.devices else ()


@dataclass(frozen=True, slots=True)
class Offer:
    """Remaining tests with the same need. The longest of them may start next."""

    key: int
    need: Need
    longest: float
    """Expected seconds of the longest test."""
    shortest: float
    """Expected seconds of the shortest test."""
    risky: bool = False
    """True if some of these tests may take many times their expected time."""


@dataclass(frozen=True, slots=True)
class Running:
    """The test (or batch of tests) that a worker runs."""

    key: int
    """Key of the offer from which it was started."""
    devices: tuple[tuple[str, int], ...]
    """The devices that it holds, each with the number of parts."""
    slots: int
    left: float
    """Expected seconds until it ends."""


@dataclass(frozen=True, slots=True)
class Start:
    """The decision to start a test now."""

    key: int
    """Key of the offer from which the test is taken."""
    devices: tuple[tuple[str, int], ...] = ()
    """The devices that it takes, each with the number of parts."""
    slots: int = 0
    limit: float | None = None
    """Take a test of at most this many expected seconds; None: take the longest of the offer."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    """The devices that are reserved for the first test that does not fit."""

    left: float
    """Expected seconds until all of them are free."""
    devices: frozenset[str]


def choose(
    offers: Sequence[Offer],
    running: Sequence[Running],
    free: Mapping[str, int],
    free_slots: int,
    horizon: float,
    warm: Collection[int] = (),
    other_workers: int = 0,
    *,
    try_first: bool = True,
) -> Start | None:
    """Return the test to start on a free worker, or None if no remaining test can start now.

    `horizon` is a lower bound, in seconds, of the time for all running and remaining tests. `warm` are the keys of the
    offers from which a free worker ran its last test: they come first among offers of the same size. `other_workers` is
    the number of other free workers if workers are as scarce as devices, else 0: a test that leaves them too few
    devices is not started if another can start. `try_first` is True if there are enough workers to find out early which
    tests take long.
    """
    ranked = _sort(offers, horizon, warm, try_first)
    if other_workers:
        names = {name for offer in offers for name in offer.need.candidates}
        least = min((offer.need.devices for offer in offers), default=0.0)
        room = sum(free.get(name, 0) for name in names) / WHOLE - other_workers * least
        ranked = [offer for offer in ranked if offer.need.devices <= room + _ROUNDING] or ranked
    reserved: _Reservation | None = None
    for offer in ranked:
        if not offer.need.requests:
            return Start(offer.key)
        start = _try_to_start(offer, free, free_slots, reserved)
        if start is not None:
            return start
        if reserved is None and offer.need.size > 0:
            lacking = [one for one in offer.need.requests if _grant((one,), free, free_slots) is None]
            reserved = _reserve(lacking[0], running, free) if lacking else None
    return None


def _sort(offers: Sequence[Offer], horizon: float, warm: Collection[int], try_first: bool) -> list[Offer]:
    urgent = {offer.key: offer.need.size for offer in offers if offer.longest >= URGENT * horizon}
    widest = max(urgent.values(), default=0.0)

    def rank(offer: Offer) -> tuple[int, float, bool, float]:
        if urgent and offer.need.size + widest > 1:
            return 0, -offer.need.size, offer.key not in warm, -offer.longest
        if offer.key in urgent:
            return 1, -offer.longest, False, -offer.need.size
        if offer.need.size > 0.5:
            return 2, -offer.need.size, offer.key not in warm, -offer.longest
        if try_first and offer.risky and offer.need.requests:
            return 3, offer.need.size, offer.key not in warm, -offer.longest
        return 4, -offer.need.size, offer.key not in warm, -offer.longest

    return sorted(offers, key=rank)


def _try_to_start(
    offer: Offer, free: Mapping[str, int], free_slots: int, reserved: _Reservation | None
) -> Start | None:
    limit = None
    room = free
    if reserved is not None and offer.longest > reserved.left:
        room = {device: 0 if device in reserved.devices else parts for device, parts in free.items()}
    granted = _grant(offer.need.requests, room, free_slots)
    if granted is None and room is not free and reserved is not None and offer.shortest <= reserved.left:
        granted, limit = _grant(offer.need.requests, free, free_slots), reserved.left
    if granted is None:
        return None
    return Start(offer.key, granted[0], granted[1], limit)


def _grant(
    requests: Sequence[Request], free: Mapping[str, int], free_slots: int
) -> tuple[tuple[tuple[str, int], ...], int] | None:
    """Return the devices and slots that the leases' policy would grant to these `requests` alone; None if not all."""
    granted = decide(requests, free, free_slots)
    if len(granted) < len(requests):
        return None
    return tuple(taken for lease in granted for taken in lease.takes()), sum(lease.slots for lease in granted)


def _reserve(request: Request, running: Sequence[Running], free: Mapping[str, int]) -> _Reservation | None:
    """Return the devices that `request` will get once enough running tests have ended; None if they do not suffice."""
    room = dict(free)
    names = set(request.candidates)
    for one in sorted(running, key=lambda one: one.left):
        freed = [device for device, _ in one.devices if device in names]
        if not freed:
            continue
        for device, parts in one.devices:
            room[device] = room.get(device, 0) + parts
        if sum(room.get(device, 0) >= request.takes(device) for device in names) < request.count // request.sets:
            continue
        # Take devices that are free now last, so that other tests can use them meanwhile.
        order = sorted(range(len(request.candidates)), key=lambda at: bool(free.get(request.candidates[at])))
        reordered = replace(
            request,
            candidates=tuple(request.candidates[at] for at in order),
            parts=tuple(request.parts[at] for at in order) if request.parts else (),
            ties=(),
            slots=0,
        )
        granted = _grant((reordered,), room, 0)
        if granted is not None:
            return _Reservation(one.left, frozenset(device for device, _ in granted[0]))
    return None
