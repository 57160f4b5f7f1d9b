"""Process groups that a test has leaked in its rank. Runs in ranks only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pytest_accel.core.group_names import group_label
from pytest_accel.rank import group_state

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pytest_accel.rank.context import RankContext


class LeakedGroups(NamedTuple):
    """The process groups that a test has not destroyed."""

    lines: tuple[str, ...] = ()
    """The text for the report."""
    kill_reason: str | None = None
    """Why this process must be killed after the test; None: no reason."""
    destroyable: bool = False
    """True if there are groups for :func:`destroy`."""


def find_leaked(context: RankContext) -> LeakedGroups:
    """Return the groups that the test has not destroyed.

    The groups of a device mesh are not reported, because torch has no function to destroy them. A group is harmless if
    `destroy` works without the other ranks and the group's name is not reused: torch numbers some groups (`_world`),
    and derives the names of the others from their ranks (`_hash_ranks_to_str`).
    """
    import torch.distributed as dist

    if context.default_group is not None and (
        not dist.is_initialized() or dist.group.WORLD is not context.default_group
    ):
        return LeakedGroups(kill_reason="the test destroyed or replaced the world's default process group")
    leaked = _leaked(context)
    if not leaked:
        return LeakedGroups()
    reported = [group_state.label(group) for group in leaked if not group.group_desc.startswith("mesh_")]
    lines = (f"did not destroy {group_label(*reported)}",) if reported else ()
    lasting = [group_state.label(group) for group in leaked if not _can_be_destroyed(group)]
    return LeakedGroups(
        lines, f"the test did not destroy {group_label(*lasting)}" if lasting else None, destroyable=True
    )


def destroy(context: RankContext) -> None:
    """Destroy the groups that the last test leaked.

    Call this after all ranks have ended the test: until then, another rank may still read from a group.
    """
    import torch.distributed as dist

    leaked = _leaked(context)
    if dist.group.WORLD in leaked:
        leaked = [dist.group.WORLD]  # Destroying the default group destroys all others.
    for group in leaked:
        dist.destroy_process_group(group)


def _leaked(context: RankContext) -> list[ProcessGroup]:
    return [group for group in group_state.all_groups() if str(group.group_name) not in context.kept_groups]


def _can_be_destroyed(group: ProcessGroup) -> bool:
    import torch.distributed as dist

    backends = {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")}
    return str(group.group_name).isdigit() and backends <= {"gloo", "fake"}
