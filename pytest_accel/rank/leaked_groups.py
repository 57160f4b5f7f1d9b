"""Process groups that a test has left in its rank. Runs in ranks only."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pytest_accel.core.rank_messages import Leak, LeakKind
from pytest_accel.core.rank_names import DEFAULT_GROUP
from pytest_accel.rank import group_state
from pytest_accel.rank.leaked_processes import Leftover

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext


def left(names: Collection[str]) -> list[Leftover]:
    """Return those of the groups `names` that have not been destroyed.

    The groups of a device mesh are left out, because torch has no function to destroy them.
    """
    found = []
    for group in group_state.all_groups():
        name = str(group.group_name)
        if name in names and not group.group_desc.startswith("mesh_"):
            label = group_state.label(group)
            # A default process group is in the way of the next test that makes one.
            leak = Leak(LeakKind.GROUP, label, lasting=label == DEFAULT_GROUP)
            found.append(Leftover(leak, [group], groups=frozenset([name])))
    return found


def default_name() -> frozenset[str]:
    """Return the name of the default process group; nothing if there is none."""
    groups = group_state.all_groups()
    return frozenset(str(group.group_name) for group in groups if group_state.label(group) == DEFAULT_GROUP)


def has_lost_default(context: RankContext) -> bool:
    """Return whether the default process group with which the world was started has been destroyed or replaced."""
    return context.default_group is not None and not group_state.has_own_default(context)
