"""Comparison of the ranks' last messages of a test: collectives, process groups and messages. Pure functions.

Messages from one rank to another with the same tag meet in the order in which they were issued, so it is enough to
compare numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from pytest_accel.core.rank_names import DEFAULT_GROUP
from pytest_accel.messages.rank_messages import Finished, UnawaitedCollective


class Mismatch(Struct, frozen=True):
    """The ranks issued different numbers of collectives in a process group, or made different numbers of groups."""

    detail: Literal["collectives", "process groups"]
    """The `Cause.detail` of a failure for this."""
    numbers: Mapping[int, int]
    """By rank. Collectives are counted since the group was made."""
    group: str = ""
    """Name of the group with the collectives, or `DEFAULT_GROUP`."""
    members: tuple[int, ...] = ()
    """The ranks of that group."""


def compare_collectives(finished: Mapping[int, Finished]) -> list[Mismatch]:
    """Return the process groups in which the ranks issued different numbers of collectives."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, left in finished.items():
        for name, (members, number) in left.collectives.items():
            if number is not None:
                groups.setdefault((name, members), {})[rank] = number
    return [
        Mismatch("collectives", numbers, *group) for group, numbers in groups.items() if len(set(numbers.values())) > 1
    ]


def compare_groups(finished: Mapping[int, Finished]) -> list[Mismatch]:
    """Return the numbers of process groups that the ranks made in the test; nothing if all are equal."""
    numbers = {rank: left.groups_by_test for rank, left in finished.items()}
    return [Mismatch("process groups", numbers)] if len(set(numbers.values())) > 1 else []


def have_different_groups(finished: Mapping[int, Finished]) -> bool:
    """Return whether some ranks have a process group that others should have, too, or that changes the next names.

    torch numbers groups in all ranks, and derives from the number the name of a group that only its members make.
    """
    held: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for rank, left in finished.items():
        for name, (members, _) in left.collectives.items():
            held.setdefault((name, members), set()).add(rank)
    return any(
        not ranks >= finished.keys() & (members if name == DEFAULT_GROUP or name.isdigit() else finished.keys())
        for (name, members), ranks in held.items()
    )


def unawaited_collectives(finished: Mapping[int, Finished]) -> dict[UnawaitedCollective, list[int]]:
    """Return the collectives of the test that it has not waited for, and that did not succeed, with their ranks."""
    ranks: dict[UnawaitedCollective, list[int]] = {}
    for rank, left in sorted(finished.items()):
        for one in left.unawaited:
            ranks.setdefault(one, []).append(rank)
    return ranks


def have_unmet_messages(finished: Mapping[int, Finished]) -> bool:
    """Return whether messages of any test or fixture are still on their way, or are awaited."""
    groups = {(name, members) for left in finished.values() for name, (members, _) in left.collectives.items()}
    for name, members in groups:
        # A rank that has destroyed the group has left nothing in it.
        ranks = {
            rank: left.messages.get(name, {})
            for rank, left in finished.items()
            if left.collectives.get(name, ((), 0))[0] == members
        }
        for tag in {tag for messages in ranks.values() for _, _, tag in messages}:
            for receiver, received in ranks.items():
                rest = [
                    sent.get((False, members.index(receiver), tag), 0)
                    - received.get((True, members.index(sender), tag), 0)
                    for sender, sent in ranks.items()
                ]
                if min(rest) < 0 or sum(rest) != received.get((True, None, tag), 0):
                    return True
    return False
