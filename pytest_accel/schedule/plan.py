"""Which test starts next: what remains, what runs and what is free in, one start out. Pure functions, no clock.

The rules:

- What takes the larger part of the devices that would do goes first. So the pieces that come free are never smaller
  than what is to be put into them next, and the end of a run is made of small tests, which fill all devices.
- A test that takes about as long as all that remains is *urgent*: it goes before larger ones, except for those that
  cannot run beside it. They would have to wait for its end, and go first.
- Tests that may last many times as long as is expected go from the smallest to the largest, but for those that run one
  after the other in any order, since they take the larger half of the devices. So most of them have begun, and the
  long ones are known, while there is enough left to run beside these. Not where workers are scarce: a worker is
  better used by a large one.
- The first that does not fit keeps what it waits for. It starts at the latest when, as far as is known, enough
  of the running tests have ended; until then others get what it will not need, or are short enough to be gone.
- Tests that need no device fill the workers that would otherwise wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request, decide

URGENT = 0.7
"""A test is urgent if it takes at least this part of the time that everything that remains takes at the least."""
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Offer:
    """Remaining tests that are alike: the longest of them may start next."""

    key: int
    request: Request | None
    """What each of them takes; None: nothing but a worker."""
    size: float
    """The part that one test takes of all devices that would do: 0 to 1."""
    devices: float
    """How many it takes, parts counted as such."""
    longest: float
    """Expected seconds of the longest."""
    shortest: float
    risky: bool = False
    """Whether one of them may well take many times as long as is expected."""


@dataclass(frozen=True, slots=True)
class Running:
    """What a worker runs."""

    key: int
    devices: tuple[tuple[str, int], ...]
    """What it holds: devices and the parts of them."""
    slots: int
    left: float
    """Expected seconds until it has come to its end."""


@dataclass(frozen=True, slots=True)
class Start:
    """The test that starts now."""

    key: int
    """The offer that it is of."""
    devices: tuple[tuple[str, int], ...] = ()
    slots: int = 0
    limit: float | None = None
    """It must be expected to take at most so many seconds; None: it is the offer's longest."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the first test that does not fit has to get."""

    left: float
    """Expected seconds until all of it is free."""
    devices: frozenset[str]


def choose(
    offers: Sequence[Offer],
    running: Sequence[Running],
    free: Mapping[str, int],
    free_slots: int,
    horizon: float,
    warm: Collection[int] = (),
    hands: int = 0,
    *,
    try_first: bool = True,
) -> Start | None:
    """The test to start on a worker that is free; None: nothing that remains can start now.

    `horizon` is the least number of seconds that everything that remains and runs can take. `warm` are the offers that
    a free worker has run a test of last: of several that are of one size they go first. `hands` are the other free
    workers, where workers are as scarce as devices: nothing starts that leaves them too few devices, if there is
    something else to start. `try_first`: there are workers enough to find out early which tests last long.
    """
    ranked = _ranked(offers, horizon, warm, try_first)
    if hands:
        room = sum(free.values()) / WHOLE - hands * min((offer.devices for offer in offers), default=0.0)
        ranked = [offer for offer in ranked if offer.devices <= room + _ROUNDING] or ranked
    kept: _Kept | None = None
    for offer in ranked:
        if offer.request is None:
            return Start(offer.key)
        start = _fit(offer, free, free_slots, kept)
        if start is not None:
            return start
        if kept is None and offer.size > 0:
            kept = _keep(offer.request, running, free)
    return None


def _ranked(offers: Sequence[Offer], horizon: float, warm: Collection[int], try_first: bool) -> list[Offer]:
    urgent = {offer.key: offer.size for offer in offers if offer.longest >= URGENT * horizon}
    widest = max(urgent.values(), default=0.0)

    def rank(offer: Offer) -> tuple[int, float, bool, float]:
        if urgent and offer.size + widest > 1:
            return 0, -offer.size, offer.key not in warm, -offer.longest
        if offer.key in urgent:
            return 1, -offer.longest, False, -offer.size
        if offer.size > 0.5:
            return 2, -offer.size, offer.key not in warm, -offer.longest
        if try_first and offer.risky and offer.request is not None:
            return 3, offer.size, offer.key not in warm, -offer.longest
        return 4, -offer.size, offer.key not in warm, -offer.longest

    return sorted(offers, key=rank)


def _fit(offer: Offer, free: Mapping[str, int], free_slots: int, kept: _Kept | None) -> Start | None:
    limit = None
    room = free
    if kept is not None and offer.longest > kept.left:
        room = {device: 0 if device in kept.devices else parts for device, parts in free.items()}
    granted = _grant(offer.request, room, free_slots)
    if granted is None and room is not free and kept is not None and offer.shortest <= kept.left:
        granted, limit = _grant(offer.request, free, free_slots), kept.left
    if granted is None:
        return None
    return Start(offer.key, granted[0], granted[1], limit)


def _grant(
    request: Request | None, free: Mapping[str, int], free_slots: int
) -> tuple[tuple[tuple[str, int], ...], int] | None:
    """What the leases' own policy would give to `request` if nobody else asked."""
    assert request is not None
    for grant in decide((request,), free, free_slots):
        return tuple(zip(grant.devices, grant.parts or (WHOLE,) * len(grant.devices), strict=True)), grant.slots
    return None


def _keep(request: Request, running: Sequence[Running], free: Mapping[str, int]) -> _Kept | None:
    """What `request` will get, when as many running tests have ended as have to; None if that is not known."""
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
        # What is free now is taken last: others may use it meanwhile.
        places = sorted(range(len(request.candidates)), key=lambda at: bool(free.get(request.candidates[at])))
        asked = replace(
            request,
            candidates=tuple(request.candidates[at] for at in places),
            parts=tuple(request.parts[at] for at in places) if request.parts else (),
            ties=(),
            slots=0,
        )
        granted = _grant(asked, room, 0)
        if granted is not None:
            return _Kept(one.left, frozenset(device for device, _ in granted[0]))
    return None
