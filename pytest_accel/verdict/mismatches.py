"""Comparison of the ranks' last messages of a test: collectives, process groups and messages. Pure functions.

Messages from one rank to another with the same tag meet in the order in which they were issued, so it is enough to
compare numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from pytest_accel.core.truncation import DEFAULT_GROUP
from pytest_accel.messages.rank_messages import Finished, GroupUse

Group = tuple[str, tuple[int, ...]]
"""Name and members of a process group. The default group has the name `DEFAULT_GROUP`."""


def _by_group(finished: Mapping[int, Finished]) -> dict[Group, dict[int, GroupUse]]:
    """Return what each rank has issued in each process group that it has."""
    groups: dict[Group, dict[int, GroupUse]] = {}
    for rank, left in finished.items():
        for name, use in left.uses.items():
            groups.setdefault((name, use.members), {})[rank] = use
    return groups


def uneven_collectives(finished: Mapping[int, Finished]) -> dict[Group, dict[int, int]]:
    """Return the numbers of collectives that the ranks issued in each group in which these numbers differ."""
    numbers = {
        group: {rank: use.collectives for rank, use in uses.items() if use.collectives is not None}
        for group, uses in _by_group(finished).items()
    }
    return {group: counts for group, counts in numbers.items() if len(set(counts.values())) > 1}


def uneven_groups(finished: Mapping[int, Finished]) -> dict[int, int]:
    """Return the numbers of process groups that the ranks made in the test; nothing if all are equal."""
    numbers = {rank: left.groups_by_test for rank, left in finished.items()}
    return numbers if len(set(numbers.values())) > 1 else {}


def have_different_groups(finished: Mapping[int, Finished]) -> bool:
    """Return whether some ranks have a process group that others should have, too, or that changes the next names.

    torch numbers groups in all ranks, and derives from the number the name of a group that only its members make.
    """
    return any(
        not uses.keys() >= finished.keys() & (members if name == DEFAULT_GROUP or name.isdigit() else finished.keys())
        for (name, members), uses in _by_group(finished).items()
    )


def have_unmet_messages(finished: Mapping[int, Finished]) -> bool:
    """Return whether messages of any test or fixture are still on their way, or are awaited."""
    # A rank that has destroyed the group has left nothing in it.
    for (_, members), uses in _by_group(finished).items():
        messages = {rank: dict(use.messages) for rank, use in uses.items()}
        for tag in {tag for issued in messages.values() for _, _, tag in issued}:
            for receiver, received in messages.items():
                rest = [
                    sent.get((False, members.index(receiver), tag), 0)
                    - received.get((True, members.index(sender), tag), 0)
                    for sender, sent in messages.items()
                ]
                if min(rest) < 0 or sum(rest) != received.get((True, None, tag), 0):
                    return True
    return False
