from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.leases.policy import Grant, Request, decide, shortages, wanted

DEVICES = ("a", "b", "c", "d", "e")
SLOTS = 4


@st.composite
def requests(draw: st.DrawFn) -> tuple[Request, ...]:
    made: list[Request] = []
    for number in range(draw(st.integers(0, 7))):
        candidates = tuple(name for name in DEVICES if draw(st.booleans()))
        count = draw(st.integers(0, len(candidates)))
        slots = draw(st.integers(0 if count else 1, SLOTS))
        ties = draw(st.lists(st.tuples(*[st.sampled_from(DEVICES)] * 2, st.floats(0, 1000)), max_size=6))
        made.append(Request(number, candidates, count, slots, tuple(ties)))
    return tuple(made)


free_devices = st.lists(st.booleans(), min_size=len(DEVICES), max_size=len(DEVICES)).map(
    lambda chosen: [name for name, is_free in zip(DEVICES, chosen, strict=True) if is_free]
)


@given(requests(), free_devices, st.integers(0, SLOTS))
def test_grants_are_whole_and_share_nothing(waiting: tuple[Request, ...], free: list[str], slots: int) -> None:
    by_id = {request.id: request for request in waiting}
    grants = decide(waiting, free, slots)
    given_out = [device for grant in grants for device in grant.devices]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= set(free)
    assert sum(grant.slots for grant in grants) <= slots
    for grant in grants:
        request = by_id[grant.request]
        assert len(grant.devices) == request.count
        assert grant.slots == request.slots
        assert list(grant.devices) == [name for name in request.candidates if name in grant.devices]


@given(requests(), free_devices, st.integers(0, SLOTS))
def test_what_nobody_before_it_waits_for_is_granted(waiting: tuple[Request, ...], free: list[str], slots: int) -> None:
    grants = {grant.request: grant for grant in decide(waiting, free, slots)}
    taken: set[str] = set()
    left = slots
    waited_for: set[str] = set()
    slots_waited_for = False
    for request in waiting:
        usable = [name for name in request.candidates if name in free and name not in taken]
        alone = waited_for.isdisjoint(request.candidates) and not (slots_waited_for and request.slots)
        if request.id in grants:
            taken.update(grants[request.id].devices)
            left -= request.slots
        else:
            assert not (alone and len(usable) >= request.count and left >= request.slots)
            waited_for.update(request.candidates if request.count else ())
            slots_waited_for |= request.slots > 0


@given(requests(), free_devices, st.integers(0, SLOTS))
def test_carried_out_once_nothing_more_is_due(waiting: tuple[Request, ...], free: list[str], slots: int) -> None:
    grants = decide(waiting, free, slots)
    granted = {grant.request for grant in grants}
    taken = {device for grant in grants for device in grant.devices}
    rest = [request for request in waiting if request.id not in granted]
    left = slots - sum(grant.slots for grant in grants)
    assert decide(rest, [name for name in free if name not in taken], left) == ()
    lacking = shortages(waiting, free, slots)
    assert [shortage.request for shortage in lacking] == rest
    assert all(shortage.devices or shortage.slots for shortage in lacking)


@given(requests().filter(bool), st.data())
def test_nobody_starves(waiting: tuple[Request, ...], data: st.DataObject) -> None:
    """However leases end and whatever arrives behind it, the request that was there is granted in bounded time."""
    target = waiting[-1]
    queue = list(waiting)
    leases: list[Grant] = []
    releases = 0
    # Each request before the target, and the target, may have to wait for every device, and then for every slot.
    bound = len(waiting) * (len(DEVICES) + SLOTS)
    number = len(waiting)
    while True:
        held = {device for lease in leases for device in lease.devices}
        free = [name for name in DEVICES if name not in held]
        for grant in decide(queue, free, SLOTS - sum(lease.slots for lease in leases)):
            leases.append(grant)
            queue = [request for request in queue if request.id != grant.request]
        if target not in queue:
            return
        assert leases, "nothing is held and yet somebody waits"
        # A flood of small requests, the worst for a large one: one arrives for each lease that ends.
        ended = leases.pop(data.draw(st.integers(0, len(leases) - 1)))
        small = Request(number, ended.devices[:1], min(1, len(ended.devices)), min(1, ended.slots))
        queue.append(small)
        number += 1
        releases += 1
        assert releases <= bound


def test_a_small_request_passes_a_large_one_only_on_other_devices() -> None:
    large = Request(1, ("a", "b"), 2)
    assert decide([large, Request(2, ("a",), 1)], ["a", "c"], 0) == ()
    assert decide([large, Request(2, ("a", "c"), 1)], ["a", "c"], 0) == (Grant(2, ("c",), 0),)


def test_a_request_that_waits_for_slots_keeps_as_many_devices_as_it_needs() -> None:
    first = Request(1, ("a", "b"), 1, slots=3)
    assert decide([first, Request(2, ("a", "b"), 1)], ["a", "b"], 2) == (Grant(2, ("b",), 0),)
    assert decide([first, Request(2, ("a", "b"), 2)], ["a", "b"], 2) == ()
    assert decide([first, Request(2, (), 0, slots=1)], ["a", "b"], 2) == ()


def test_a_request_that_waits_for_devices_leaves_the_slots_to_others() -> None:
    first = Request(1, ("a", "b"), 2, slots=3)
    assert decide([first, Request(2, (), 0, slots=4)], ["a"], 4) == (Grant(2, (), 4),)


@pytest.mark.parametrize(
    ("ties", "count", "expected"),
    [
        ((), 2, ("a", "b")),
        ((("b", "d", 1.0),), 2, ("b", "d")),
        ((("d", "b", 1.0),), 2, ("b", "d")),
        ((("a", "b", 1.0), ("c", "d", 1.0)), 2, ("a", "b")),
        ((("a", "b", 1.0), ("c", "d", 2.0)), 2, ("c", "d")),
        ((("b", "c", 1.0), ("c", "d", 1.0), ("b", "d", 1.0), ("a", "b", 2.0)), 3, ("a", "b", "c")),
        ((("b", "c", 1.0), ("c", "d", 1.0), ("b", "d", 1.0), ("a", "b", 1.0)), 3, ("b", "c", "d")),
        ((("b", "d", 1.0),), 1, ("a",)),
        ((("b", "x", 9.0),), 2, ("a", "b")),
    ],
)
def test_devices_that_go_together_are_taken_together(
    ties: tuple[tuple[str, str, float], ...], count: int, expected: tuple[str, ...]
) -> None:
    free = ["a", "b", "c", "d"]
    assert decide([Request(1, tuple(free), count, ties=ties)], free, 0) == (Grant(1, expected, 0),)


def test_wanted_are_the_leases_that_hold_what_somebody_lacks() -> None:
    held = {"a": 10, "b": 11, "c": 12}
    slots = {10: 0, 11: 2, 13: 2}
    assert wanted([Request(1, ("a", "b", "d"), 2)], ["d"], 0, held, slots) == {10, 11}
    assert wanted([Request(1, ("d",), 1, slots=1)], ["d"], 0, held, slots) == {11, 13}
    assert wanted([Request(1, ("d",), 1)], ["d"], 0, held, slots) == frozenset()
    assert wanted([], ["d"], 0, held, slots) == frozenset()
