"""Tests of the comparison of the collectives, process groups and messages of ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_accel.messages.rank_messages import Finished, GroupUse
from pytest_accel.verdict.mismatches import have_unmet_messages, uneven_collectives

Counts = Mapping[tuple[str, int | None, int], int]
"""Numbers of operations by direction (``to`` or ``from``), peer (None: any) and tag."""


def have_unmet(*ranks: Counts, members: tuple[int, ...] | None = None) -> bool:
    """Return whether messages have not met in a group in which the ranks have issued these operations."""
    members = members or tuple(range(len(ranks)))
    messages = [tuple(((way == "from", peer, tag), n) for (way, peer, tag), n in counts.items()) for counts in ranks]
    return have_unmet_messages(
        {rank: Finished(1, {"3": GroupUse(members, 0, own)}) for rank, own in zip(members, messages, strict=True)}
    )


@pytest.mark.parametrize(
    ("ranks", "unmet"),
    [
        (({}, {}), False),
        (({("to", 1, 0): 2}, {("from", 0, 0): 2}), False),
        (({("to", 1, 0): 1, ("to", 1, 5): 1}, {("from", None, 0): 1, ("from", 0, 5): 1}), False),
        (({("to", 1, 0): 1}, {}), True),
        (({}, {("from", 0, 0): 1}), True),
        (({}, {("from", None, 0): 1}), True),
        (({("to", 1, 0): 2}, {("from", None, 0): 1}), True),
        (({("to", 1, 0): 1}, {("from", 0, 7): 1}), True),
        # A receive from rank 2 is not met by a message of rank 0.
        (({("to", 1, 0): 2}, {("from", 2, 0): 1, ("from", None, 0): 1}, {}), True),
    ],
)
def test_messages_that_have_not_met(ranks: tuple[Counts, ...], unmet: bool) -> None:
    assert have_unmet(*ranks) == unmet
    assert have_unmet(*ranks, members=(2, 5, 7)[: len(ranks)]) == unmet


def test_a_rank_that_has_destroyed_the_group_has_left_nothing() -> None:
    left = Finished(1, {"3": GroupUse((0, 1), 0, (((False, 1, 0), 1),))})
    assert not have_unmet_messages({0: left, 1: Finished(1, {})})


def finished(*counts: Mapping[str, GroupUse]) -> dict[int, Finished]:
    return {rank: Finished(1, uses) for rank, uses in enumerate(counts)}


def test_ranks_with_equal_numbers_of_collectives_do_not_differ() -> None:
    assert uneven_collectives({}) == uneven_collectives(finished({}, {})) == {}
    assert uneven_collectives(finished({"0": GroupUse((0, 1), 4)}, {"0": GroupUse((0, 1), 4)})) == {}


def test_groups_with_the_same_name_and_different_members_are_different_groups() -> None:
    """Give each pair of ranks its own group. A rank knows only the groups that it belongs to."""
    left, right, world = (0, 1), (2, 3), (0, 1, 2, 3)
    numbers: list[tuple[tuple[int, ...], int]] = [(left, 5), (left, 5), (right, 6), (right, 6)]
    counts: list[dict[str, GroupUse]] = [
        {"0": GroupUse(world, 1), "1": GroupUse(pair, number)} for pair, number in numbers
    ]
    assert uneven_collectives(finished(*counts)) == {}
    counts[3]["1"] = GroupUse(right, 7)
    assert uneven_collectives(finished(*counts)) == {("1", right): {2: 6, 3: 7}}
