"""Tests of the policy that decides which waiting requests are granted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Lease, Request, decide, shortages, wanted

DEVICES = ("a", "b", "c", "d", "e")
SLOTS = 4


PARTS = (WHOLE // 4, WHOLE // 3, WHOLE // 2, WHOLE * 7 // 10)


def whole(*devices: str) -> dict[str, int]:
    return dict.fromkeys(devices, WHOLE)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Request, ...]:
    made: list[Request] = []
    for number in range(draw(st.integers(0, 7))):
        candidates = tuple(name for name in DEVICES if draw(st.booleans()))
        count = draw(st.integers(0, len(candidates)))
        slots = draw(st.integers(0 if count else 1, SLOTS))
        ties = draw(st.lists(st.tuples(*[st.sampled_from(DEVICES)] * 2, st.floats(0, 1000)), max_size=6))
        parts: tuple[int, ...] = ()
        sets = 1
        if count and draw(st.booleans()):
            parts = tuple(draw(st.sampled_from(PARTS)) for _ in candidates)
            sets = draw(st.integers(1, 4))
            places = sum(min(sets, WHOLE // taken) for taken in parts)
            count = sets * draw(st.integers(1, max(1, min(len(candidates), places // sets))))
            if count > places:
                count, sets = 1, 1
        made.append(Request(number, candidates, count, slots, tuple(ties), parts, sets))
    return tuple(made)


free_devices = st.lists(
    st.sampled_from([0, WHOLE // 5, WHOLE // 2, WHOLE, WHOLE]), min_size=len(DEVICES), max_size=len(DEVICES)
).map(lambda parts: dict(zip(DEVICES, parts, strict=True)))


def without(free: Mapping[str, int], grants: Iterable[Lease]) -> dict[str, int]:
    """Return the free parts of each device that remain after `grants`."""
    left = dict(free)
    for grant in grants:
        for device, parts in grant.takes():
            left[device] -= parts
    return left


@given(requests(), free_devices, st.integers(0, SLOTS))
def test_grants_are_complete_and_never_exceed_the_free_resources(
    waiting: tuple[Request, ...], free: dict[str, int], slots: int
) -> None:
    by_id = {request.id: request for request in waiting}
    grants = decide(waiting, free, slots)
    assert min(without(free, grants).values()) >= 0
    assert sum(grant.slots for grant in grants) <= slots
    for grant in grants:
        request = by_id[grant.id]
        assert len(grant.devices) == request.count
        assert grant.slots == request.slots
        assert [parts for _, parts in grant.takes()] == [request.takes(device) for device in grant.devices]
        size = request.count // request.sets
        for start in range(0, request.count, size or 1):
            one_set = grant.devices[start : start + size]
            assert list(one_set) == [name for name in request.candidates if name in one_set]


@given(requests(), free_devices, st.integers(0, SLOTS))
def test_a_request_is_granted_if_no_earlier_one_waits_for_the_same(
    waiting: tuple[Request, ...], free: dict[str, int], slots: int
) -> None:
    grants = {grant.id: grant for grant in decide(waiting, free, slots)}
    left = dict(free)
    left_slots = slots
    waited_for: set[str] = set()
    slots_waited_for = False
    for request in waiting:
        fitting = [name for name in request.candidates if left[name] >= request.takes(name)]
        unblocked = waited_for.isdisjoint(request.candidates) and not (slots_waited_for and request.slots)
        if request.id in grants:
            left = without(left, [grants[request.id]])
            left_slots -= request.slots
        else:
            enough = len(fitting) >= request.count if request.sets == 1 else False
            assert not (unblocked and enough and left_slots >= request.slots)
            waited_for.update(request.candidates if request.count else ())
            slots_waited_for |= request.slots > 0


@given(requests(), free_devices, st.integers(0, SLOTS))
def test_a_second_decision_grants_nothing_more(waiting: tuple[Request, ...], free: dict[str, int], slots: int) -> None:
    grants = decide(waiting, free, slots)
    granted = {grant.id for grant in grants}
    rest = [request for request in waiting if request.id not in granted]
    left = slots - sum(grant.slots for grant in grants)
    assert decide(rest, without(free, grants), left) == ()
    lacking = shortages(waiting, free, slots)
    assert [shortage.request for shortage in lacking] == rest
    assert all(shortage.devices or shortage.slots for shortage in lacking)


@given(requests().filter(bool), st.data())
def test_no_request_starves(waiting: tuple[Request, ...], data: st.DataObject) -> None:
    """A request is granted after a limited number of releases, whichever leases end and whatever arrives after it."""
    target = waiting[-1]
    queue = list(waiting)
    leases: list[Lease] = []
    releases = 0
    # The target and each request before it may have to wait for all leases on every device, and for all slots.
    bound = len(waiting) * (len(DEVICES) * (WHOLE // min(PARTS)) + SLOTS)
    number = len(waiting)
    while True:
        free = without(whole(*DEVICES), leases)
        for grant in decide(queue, free, SLOTS - sum(lease.slots for lease in leases)):
            leases.append(grant)
            queue = [request for request in queue if request.id != grant.id]
        if target not in queue:
            return
        assert leases, "a request waits although nothing is leased"
        # The worst case for a large request: a small one arrives for each lease that ends.
        ended = leases.pop(data.draw(st.integers(0, len(leases) - 1)))
        small = Request(
            number, ended.devices[:1], min(1, len(ended.devices)), min(1, ended.slots), parts=ended.parts[:1]
        )
        queue.append(small)
        number += 1
        releases += 1
        assert releases <= bound


def test_a_small_request_passes_a_large_one_only_on_other_devices() -> None:
    large = Request(1, ("a", "b"), 2)
    assert decide([large, Request(2, ("a",), 1)], whole("a", "c"), 0) == ()
    assert decide([large, Request(2, ("a", "c"), 1)], whole("a", "c"), 0) == (Lease(2, ("c",), 0),)


def test_a_request_that_waits_for_slots_keeps_as_many_devices_as_it_needs() -> None:
    first = Request(1, ("a", "b"), 1, slots=3)
    assert decide([first, Request(2, ("a", "b"), 1)], whole("a", "b"), 2) == (Lease(2, ("b",), 0),)
    assert decide([first, Request(2, ("a", "b"), 2)], whole("a", "b"), 2) == ()
    assert decide([first, Request(2, (), 0, slots=1)], whole("a", "b"), 2) == ()


def test_a_request_that_waits_for_devices_leaves_the_slots_to_others() -> None:
    first = Request(1, ("a", "b"), 2, slots=3)
    assert decide([first, Request(2, (), 0, slots=4)], whole("a"), 4) == (Lease(2, (), 4),)


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
def test_linked_devices_are_chosen_together(
    ties: tuple[tuple[str, str, float], ...], count: int, expected: tuple[str, ...]
) -> None:
    free = ["a", "b", "c", "d"]
    assert decide([Request(1, tuple(free), count, ties=ties)], whole(*free), 0) == (Lease(1, expected, 0),)


def test_leases_that_hold_what_a_request_lacks_are_wanted() -> None:
    leases = [Lease(10, ("a",), 0), Lease(11, ("b",), 2), Lease(12, ("c",), 0), Lease(13, (), 2)]
    assert wanted([Request(1, ("a", "b", "d"), 2)], whole("d"), 0, leases) == (10, 11)
    assert wanted([Request(1, ("d",), 1, slots=1)], whole("d"), 0, leases) == (11, 13)
    assert wanted([Request(1, ("d",), 1)], whole("d"), 0, leases) == ()
    assert wanted([], whole("d"), 0, leases) == ()


def test_leases_on_devices_that_are_reserved_for_a_request_are_wanted_first() -> None:
    leases = [Lease(10, ("a",), 0), Lease(11, ("a",), 0), Lease(12, ("b",), 0), Lease(13, ("c", "b"), 0)]
    free = {"a": WHOLE // 4, "b": WHOLE // 2, "c": 0}
    assert wanted([Request(1, ("a", "b"), 1)], free, 0, leases) == (12, 13, 10, 11)


QUARTER, HALF = WHOLE // 4, WHOLE // 2


def test_a_share_is_placed_where_the_smallest_part_remains() -> None:
    free = {"a": WHOLE, "b": HALF, "c": QUARTER, "d": HALF}
    quarter = Request(1, ("a", "b", "c", "d"), 1, parts=(QUARTER,) * 4)
    assert decide([quarter], free, 0) == (Lease(1, ("c",), 0, (QUARTER,)),)
    assert decide([quarter], {**free, "c": 0}, 0) == (Lease(1, ("b",), 0, (QUARTER,)),)
    assert decide([quarter], {"a": QUARTER - 1, "b": WHOLE}, 0) == (Lease(1, ("b",), 0, (QUARTER,)),)


def test_a_whole_device_is_granted_only_if_no_share_of_it_is_leased() -> None:
    assert decide([Request(1, ("a", "b"), 1)], {"a": WHOLE - 1, "b": WHOLE}, 0) == (Lease(1, ("b",), 0),)
    assert decide([Request(1, ("a",), 1)], {"a": WHOLE - 1}, 0) == ()
    assert decide([Request(1, ("a",), 1, parts=(1,))], {"a": 0}, 0) == ()
    half, more = Request(1, ("a",), 1, parts=(HALF,)), Request(2, ("a",), 1, parts=(HALF + 1,))
    assert decide([half, more], whole("a"), 0) == (Lease(1, ("a",), 0, (HALF,)),)


def test_shares_of_several_devices_are_on_different_devices() -> None:
    halves = Request(1, ("a", "b", "c"), 2, parts=(HALF,) * 3)
    assert decide([halves], whole("a"), 0) == ()
    assert decide([halves], {"a": WHOLE, "b": 0, "c": HALF}, 0) == (Lease(1, ("a", "c"), 0, (HALF, HALF)),)


def test_sets_may_share_a_device() -> None:
    candidates = ("a", "b")
    four = Request(1, candidates, 4, parts=(QUARTER, QUARTER), sets=4)
    assert decide([four], whole("a", "b"), 0) == (Lease(1, ("a",) * 4, 0, (QUARTER,) * 4),)
    assert decide([four], {"a": HALF, "b": WHOLE}, 0) == (Lease(1, ("a", "a", "b", "b"), 0, (QUARTER,) * 4),)
    assert decide([four], {"a": HALF, "b": QUARTER}, 0) == ()
    pairs = Request(1, candidates, 4, parts=(HALF, HALF), sets=2)
    assert decide([pairs], whole("a", "b"), 0) == (Lease(1, ("a", "b", "a", "b"), 0, (HALF,) * 4),)
    assert decide([pairs], {"a": WHOLE, "b": HALF}, 0) == ()


def test_no_share_of_a_reserved_device_is_granted() -> None:
    first = Request(1, ("a", "b"), 1)
    small = Request(2, ("a", "b"), 1, parts=(QUARTER, QUARTER))
    assert decide([first, small], {"a": QUARTER, "b": HALF}, 0) == (Lease(2, ("a",), 0, (QUARTER,)),)
    assert decide([first, small], {"a": 0, "b": HALF}, 0) == ()


def test_a_request_for_shares_keeps_as_many_devices_as_it_needs() -> None:
    """Later requests for shares could otherwise take each part that is returned, and the first one would starve."""
    names = ("a", "b", "c")
    small = Request(2, names, 1, parts=(QUARTER,) * 3)
    six = Request(1, names, 6, parts=(QUARTER,) * 3, sets=6)
    assert decide([six, small], {"a": QUARTER, "b": HALF, "c": QUARTER}, 0) == (Lease(2, ("c",), 0, (QUARTER,)),)
    assert decide([six, small], {"a": QUARTER, "b": HALF, "c": 0}, 0) == ()
    # One set of two needs two devices, however much is free of the first.
    assert decide([Request(1, ("a", "b"), 2, parts=(HALF, HALF)), small], {"a": WHOLE, "b": QUARTER, "c": 0}, 0) == ()
    # Two sets of two find two places on the first device, not four, and one on each other device.
    pairs = Request(1, names, 4, parts=(QUARTER, WHOLE * 7 // 10, WHOLE * 7 // 10), sets=2)
    assert decide([pairs, small], {"a": WHOLE, "b": WHOLE, "c": HALF}, 0) == ()
