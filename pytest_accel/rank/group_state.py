"""The process groups of a rank: their names, members, and numbers of collectives and messages.

Runs in ranks only.
"""

from __future__ import annotations

from sys import modules
from typing import TYPE_CHECKING, Any

from pytest_accel.compat import torch_api
from pytest_accel.core.truncation import DEFAULT_GROUP
from pytest_accel.messages.rank_messages import GroupUse
from pytest_accel.messages.unix_sockets import is_readable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pytest_accel.rank.context import RankContext


def all_groups() -> list[ProcessGroup]:
    """Return this rank's process groups."""
    dist = _distributed()
    return [] if dist is None or not dist.is_initialized() else torch_api.groups()


def _distributed() -> Any:
    """Return torch.distributed; None if this process has not imported it, or torch was built without it."""
    dist: Any = modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() else None


def label(group: ProcessGroup) -> str:
    """Return the name of `group`; `DEFAULT_GROUP` for the default group."""
    import torch.distributed as dist

    return DEFAULT_GROUP if group is dist.group.WORLD else str(group.group_name)


def labels() -> dict[str, str | None]:
    """Return the label of each process group of this rank, by the group's name; None for a group of a device mesh.

    torch has no function to destroy the groups of a mesh.
    """
    return {str(one.group_name): None if one.group_desc.startswith("mesh_") else label(one) for one in all_groups()}


def uses(context: RankContext) -> dict[str, GroupUse]:
    """Return what this rank has issued in each of its groups, by the group's name.

    The result is empty if torch does not number the ranks as the world does: then equal names do not mean the same
    group on all ranks. Messages are left out if compiled code may send, which is not counted.
    """
    if not is_numbered_as_its_world(context):
        return {}
    import torch.distributed as dist

    issued, counts_all = context.operations, not torch_api.compiles_messages()
    return {
        label(group): (
            tuple(dist.get_process_group_ranks(group)),
            issued.collectives(group),
            issued.messages(group) if counts_all else {},
        )
        for group in all_groups()
    }


def reaches_store(context: RankContext) -> bool:
    """Return whether this rank is still connected to the world's store, if it has one.

    torch's server ends the connection when a key or a value is too large, and torch does not connect again.
    """
    connection = context.store_connection
    # To ask the server after each test would take a tenth of the test's time, and more on a busy machine. It sends
    # nothing but answers, so something to read is the end of the connection, or an answer to another thread.
    if context.store is None or (connection is not None and not is_readable(connection)):
        return True
    try:
        context.store.check(["accel"])
    except RuntimeError:
        return False
    return True


def has_own_default(context: RankContext) -> bool:
    """Return whether the default process group is still the group that the world was started with."""
    dist = _distributed()
    return dist is not None and context.default_group is not None and dist.group.WORLD is context.default_group


def is_numbered_as_its_world(context: RankContext) -> bool:
    """Return whether torch numbers the ranks as the world does. It does not if only some ranks created the group."""
    dist = _distributed()
    if dist is None or not dist.is_initialized():
        return False
    if dist.group.WORLD is context.default_group:
        return True
    return bool((dist.get_rank(), dist.get_world_size()) == (context.rank, context.spec.ranks))
