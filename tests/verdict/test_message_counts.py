"""Tests of the comparison of messages that ranks have sent and received."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from pytest_accel.core.frames import Folders
from pytest_accel.core.group_names import DEFAULT_GROUP
from pytest_accel.core.rank_messages import CallSite, Channel, Finished, GroupMessages, MessageCount
from pytest_accel.verdict.message_counts import are_pending, unmatched_messages

Counts = Mapping[tuple[str, int | None, int], int]
"""Numbers of operations by direction (``to`` or ``from``), peer (None: any) and tag."""


def channel(direction: str, peer: int | None) -> Channel:
    return direction == "from", peer


def messages(by_test: Counts, by_fixtures: Counts = MappingProxyType({})) -> GroupMessages:
    issued: dict[Channel, int] = {}
    for counts in (by_test, by_fixtures):
        for (direction, peer, _), number in counts.items():
            issued[channel(direction, peer)] = issued.get(channel(direction, peer), 0) + number
    place = CallSite("dist.isend", "test_a.py", 3)
    counts_by_test = [
        MessageCount(channel(direction, peer), tag, number, place) for (direction, peer, tag), number in by_test.items()
    ]
    return GroupMessages(issued, tuple(counts_by_test))


def lines(*ranks: GroupMessages, members: tuple[int, ...] | None = None, name: str = DEFAULT_GROUP) -> list[str]:
    """Return the lines without the place, which all have."""
    members = members or tuple(range(len(ranks)))
    finished = {
        rank: Finished(1, {name: (members, 0)}, messages={name: one}) for rank, one in zip(members, ranks, strict=True)
    }
    found = unmatched_messages(finished, Folders())
    assert all(line.endswith(": dist.isend at test_a.py:3") for line in found)
    return [line.removesuffix(": dist.isend at test_a.py:3") for line in found]


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
def test_messages_with_a_counterpart_have_no_line(left: Counts, right: Counts, fixtures: tuple[Counts, Counts]) -> None:
    assert lines(messages(left, fixtures[0]), messages(right, fixtures[1])) == []


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


SENT = "rank 0 sent {} to rank 1 that rank 1 did not receive"
AWAITED = "rank 1 waits for {} from rank 0 that rank 0 did not send"


@pytest.mark.parametrize(
    ("left", "right", "fixtures", "expected"),
    [
        ({("to", 1, 0): 1}, {}, ({}, {}), [SENT.format("1 message")]),
        ({("to", 1, 0): 3}, {("from", 0, 0): 1}, ({}, {}), [SENT.format("2 messages")]),
        ({}, {("from", 0, 0): 1}, ({}, {}), [AWAITED.format("1 message")]),
        ({}, {("from", None, 0): 1}, ({}, {}), ["rank 1 waits for 1 message that no rank sent"]),
        ({("to", 1, 0): 2}, {("from", None, 0): 1}, ({}, {}), [SENT.format("1 message")]),
        (
            {("to", 1, 0): 1},
            {("from", 0, 7): 1},
            ({}, {}),
            [SENT.format("1 message"), AWAITED.format("1 message")],
        ),
        # The fixture's message hides none of the test's.
        ({("to", 1, 0): 1}, {}, ({("to", 1, 0): 1}, {}), [SENT.format("1 message")]),
        ({("to", 1, 0): 3}, {}, ({}, {("from", 0, 0): 1}), [SENT.format("2 messages")]),
        ({}, {("from", 0, 0): 2}, ({("to", 1, 0): 1}, {}), [AWAITED.format("1 message")]),
    ],
)
def test_messages_without_a_counterpart_are_named(
    left: Counts, right: Counts, fixtures: tuple[Counts, Counts], expected: list[str]
) -> None:
    assert lines(messages(left, fixtures[0]), messages(right, fixtures[1])) == expected


def test_a_receive_from_a_rank_is_not_met_by_a_message_of_another_rank() -> None:
    receiver = messages({("from", 2, 0): 1, ("from", None, 0): 1})
    assert lines(messages({("to", 1, 0): 2}), receiver, messages({})) == [
        "rank 1 waits for 1 message from rank 2 that rank 2 did not send"
    ]


def test_messages_in_a_subgroup_are_named_by_the_ranks_of_the_world() -> None:
    assert lines(messages({("to", 1, 0): 1}), messages({}), members=(2, 5), name="3") == [
        "rank 2 sent 1 message to rank 5 that rank 5 did not receive in process group 3"
    ]


def test_a_rank_that_has_destroyed_the_group_has_left_nothing() -> None:
    left = Finished(1, {"3": ((0, 1), 0)}, messages={"3": messages({("to", 1, 0): 1})})
    assert unmatched_messages({0: left, 1: Finished(1, {})}, Folders()) == []


@pytest.mark.parametrize("field", ["failed", "shared"])
def test_channels_on_which_numbers_tell_nothing_are_not_compared(field: str) -> None:
    one = GroupMessages({(True, 0): 1}, messages({("from", 0, 0): 1}).by_test, **{field: frozenset({(True, 0)})})
    assert lines(messages({("to", 1, 0): 5}), one) == []


def test_many_lines_are_cut() -> None:
    ranks = [messages({("to", (rank + 1) % 20, 0): 1}) for rank in range(20)]
    finished = {
        rank: Finished(1, {DEFAULT_GROUP: (tuple(range(20)), 0)}, messages={DEFAULT_GROUP: one})
        for rank, one in enumerate(ranks)
    }
    found = unmatched_messages(finished, Folders())
    assert (len(found), found[-1]) == (9, "... and 12 more of this kind")
