"""Tests of the comparison of the collectives, process groups and messages of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from pytest_accel.core.rank_messages import CallSite, Channel, Finished, GroupMessages, MessageCount
from pytest_accel.core.rank_names import DEFAULT_GROUP
from pytest_accel.verdict.mismatches import (
    UnequalCollectives,
    are_pending,
    compare_collectives,
    unmet_messages,
)

Counts = Mapping[tuple[str, int | None, int], int]
"""Numbers of operations by direction (``to`` or ``from``), peer (None: any) and tag."""


PLACE = CallSite("dist.isend", "test_a.py", 3)


def channel(direction: str, peer: int | None) -> Channel:
    return direction == "from", peer


def messages(by_test: Counts, by_fixtures: Counts = MappingProxyType({})) -> GroupMessages:
    issued: dict[Channel, int] = {}
    for counts in (by_test, by_fixtures):
        for (direction, peer, _), number in counts.items():
            issued[channel(direction, peer)] = issued.get(channel(direction, peer), 0) + number
    counts_by_test = [
        MessageCount(channel(direction, peer), tag, number, PLACE) for (direction, peer, tag), number in by_test.items()
    ]
    return GroupMessages(issued, tuple(counts_by_test))


def unmet(
    *ranks: GroupMessages, members: tuple[int, ...] | None = None, name: str = DEFAULT_GROUP
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the number, the receiver and the senders of messages without a counterpart."""
    members = members or tuple(range(len(ranks)))
    finished = {
        rank: Finished(1, {name: (members, 0)}, messages={name: one}) for rank, one in zip(members, ranks, strict=True)
    }
    found = unmet_messages(finished)
    assert all((one.group, one.place) == (name, PLACE) for one in found)
    return [(one.number, one.receiver, one.senders) for one in found]


@pytest.mark.parametrize(
    ("left", "right", "fixtures"),
    [
        ({}, {}, ({}, {})),
        ({("to", 1, 0): 2}, {("from", 0, 0): 2}, ({}, {})),
        ({("to", 1, 0): 1, ("to", 1, 5): 1}, {("from", None, 0): 1, ("from", 0, 5): 1}, ({}, {})),
        # A fixture of a wider scope is at one end.
        ({}, {}, ({("to", 1, 0): 1}, {})),
        ({}, {("from", 0, 0): 1}, ({("to", 1, 0): 2}, {})),
        ({}, {("from", None, 0): 1}, ({("to", 1, 0): 1}, {})),
        ({("to", 1, 0): 1}, {}, ({}, {("from", 0, 0): 1})),
        ({("to", 1, 0): 1}, {}, ({}, {("from", None, 0): 2})),
    ],
)
def test_messages_with_a_counterpart_are_met(left: Counts, right: Counts, fixtures: tuple[Counts, Counts]) -> None:
    assert unmet(messages(left, fixtures[0]), messages(right, fixtures[1])) == []


@pytest.mark.parametrize(
    ("left", "right", "pending"),
    [
        (messages({}), messages({}), False),
        (messages({("to", 1, 0): 1}), messages({("from", 0, 0): 1}), False),
        (messages({}, {("to", 1, 0): 1}), messages({}), True),
        (messages({}, {("to", 1, 0): 1}), messages({("from", None, 0): 1}), False),
        (messages({}), messages({}, {("from", None, 0): 1}), True),
    ],
)
def test_messages_of_wider_fixtures_are_pending_until_they_have_met(
    left: GroupMessages, right: GroupMessages, pending: bool
) -> None:
    group: dict[str, tuple[tuple[int, ...], int | None]] = {DEFAULT_GROUP: ((0, 1), 0)}
    finished = {rank: Finished(1, group, messages={DEFAULT_GROUP: one}) for rank, one in enumerate((left, right))}
    assert are_pending(finished) == pending


@pytest.mark.parametrize(
    ("left", "right", "fixtures", "expected"),
    [
        ({("to", 1, 0): 1}, {}, ({}, {}), [(1, 1, (0,))]),
        ({("to", 1, 0): 3}, {("from", 0, 0): 1}, ({}, {}), [(2, 1, (0,))]),
        ({}, {("from", 0, 0): 1}, ({}, {}), [(-1, 1, (0,))]),
        ({}, {("from", None, 0): 1}, ({}, {}), [(-1, 1, ())]),
        ({("to", 1, 0): 2}, {("from", None, 0): 1}, ({}, {}), [(1, 1, (0,))]),
        ({("to", 1, 0): 1}, {("from", 0, 7): 1}, ({}, {}), [(1, 1, (0,)), (-1, 1, (0,))]),
        # The fixture's message hides none of the test's.
        ({("to", 1, 0): 1}, {}, ({("to", 1, 0): 1}, {}), [(1, 1, (0,))]),
        ({("to", 1, 0): 3}, {}, ({}, {("from", 0, 0): 1}), [(2, 1, (0,))]),
        ({}, {("from", 0, 0): 2}, ({("to", 1, 0): 1}, {}), [(-1, 1, (0,))]),
    ],
)
def test_messages_without_a_counterpart_are_found(
    left: Counts, right: Counts, fixtures: tuple[Counts, Counts], expected: list[tuple[int, int, tuple[int, ...]]]
) -> None:
    assert unmet(messages(left, fixtures[0]), messages(right, fixtures[1])) == expected


def test_a_receive_from_a_rank_is_not_met_by_a_message_of_another_rank() -> None:
    receiver = messages({("from", 2, 0): 1, ("from", None, 0): 1})
    assert unmet(messages({("to", 1, 0): 2}), receiver, messages({})) == [(-1, 1, (2,))]


def test_messages_in_a_subgroup_are_named_by_the_ranks_of_the_world() -> None:
    assert unmet(messages({("to", 1, 0): 1}), messages({}), members=(2, 5), name="3") == [(1, 5, (2,))]


def test_a_rank_that_has_destroyed_the_group_has_left_nothing() -> None:
    left = Finished(1, {"3": ((0, 1), 0)}, messages={"3": messages({("to", 1, 0): 1})})
    assert unmet_messages({0: left, 1: Finished(1, {})}) == []


@pytest.mark.parametrize("field", ["failed", "shared"])
def test_channels_on_which_numbers_tell_nothing_are_not_compared(field: str) -> None:
    one = GroupMessages({(True, 0): 1}, messages({("from", 0, 0): 1}).by_test, **{field: frozenset({(True, 0)})})
    assert unmet(messages({("to", 1, 0): 5}), one) == []


def finished(*counts: Mapping[str, tuple[tuple[int, ...], int | None]]) -> dict[int, Finished]:
    return {rank: Finished(1, collectives) for rank, collectives in enumerate(counts)}


def test_ranks_with_equal_numbers_of_collectives_do_not_differ() -> None:
    assert compare_collectives({}) == compare_collectives(finished({}, {})) == []
    assert compare_collectives(finished({"0": ((0, 1), 4)}, {"0": ((0, 1), 4)})) == []


def test_groups_with_the_same_name_and_different_members_are_different_groups() -> None:
    """Give each pair of ranks its own group. A rank knows only the groups that it belongs to."""
    left, right, world = (0, 1), (2, 3), (0, 1, 2, 3)
    counts = [{"0": (world, 1), "1": (pair, number)} for pair, number in ((left, 5), (left, 5), (right, 6), (right, 6))]
    assert compare_collectives(finished(*counts)) == []
    counts[3]["1"] = (right, 7)
    assert compare_collectives(finished(*counts)) == [UnequalCollectives("1", right, {2: 6, 3: 7})]
