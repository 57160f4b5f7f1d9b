"""The process groups of a rank: their names, members and numbers of collectives, and torch's record of these.

Runs in ranks only.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from sys import _current_frames, modules
from threading import get_ident, main_thread
from typing import TYPE_CHECKING, Any

from pytest_accel.core import torch_api
from pytest_accel.core.clock import wall_clock
from pytest_accel.core.frames import place_of_main_thread
from pytest_accel.core.paths import flight_path
from pytest_accel.core.rank_messages import GroupMessages
from pytest_accel.core.rank_names import DEFAULT_GROUP, recorded_group
from pytest_accel.core.record_events import CollectiveCall
from pytest_accel.rank import flight_recorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pytest_accel.rank.context import RankContext

_IN_ONE_PROCESS = frozenset(("fake", "threaded"))
"""Backends whose messages do not leave the process."""
_ONLY_GLOO = frozenset(("cpu:gloo", "cuda:gloo"))
"""The parts of the backend configuration of a group that uses gloo for all devices."""


def all_groups() -> list[ProcessGroup]:
    """Return this rank's process groups."""
    dist = _distributed()
    return [] if dist is None or not dist.is_initialized() else torch_api.groups()


def _distributed() -> Any:
    """Return torch.distributed; None if this process has not imported it, or torch was built without it."""
    dist: Any = modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() else None


def label(group: ProcessGroup) -> str:
    """Return the name of `group`; `DEFAULT_GROUP` for the default one."""
    import torch.distributed as dist

    return DEFAULT_GROUP if group is dist.group.WORLD else str(group.group_name)


def group_names() -> set[str]:
    """Return the names of this rank's process groups."""
    return {str(group.group_name) for group in all_groups()}


def _members() -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group to which this rank belongs, by the group's name."""
    import torch.distributed as dist

    return {label(group): tuple(dist.get_process_group_ranks(group)) for group in all_groups()}


def collectives(context: RankContext) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Return the ranks and the number of issued collectives of each group of this rank, by the group's name.

    The number is None if the backend does not number collectives; gloo and nccl do. The result is empty if torch does
    not number the ranks as the world does: then equal names do not mean the same group on all ranks.
    """
    numbers: dict[str, tuple[tuple[int, ...], int | None]] = {}
    if not _is_numbered_as_its_world(context):
        return numbers
    import torch.distributed as dist

    for group in all_groups():
        number = _sequence_number(group)
        if group.name() == "gloo":  # gloo numbers messages, too.
            number = context.operations.without_messages(group, partial(torch_api.sequence_number, group))
        numbers[label(group)] = tuple(dist.get_process_group_ranks(group)), number
    return numbers


def _sequence_number(group: ProcessGroup) -> int | None:
    """Return the number of the last operation of `group`, as in torch's record; None if its backend numbers none."""
    with suppress(RuntimeError):
        return torch_api.sequence_number(group)
    return None


def messages(context: RankContext) -> dict[str, GroupMessages]:
    """End the test's point-to-point operations, and return those of each group of this rank, by the group's name.

    The result is empty in the cases of `collectives`, and if compiled code may send, which is not counted. Groups that
    keep all messages in one process are left out.
    """
    groups = all_groups() if _is_numbered_as_its_world(context) and not torch_api.compiles_messages() else []
    found = context.operations.end(groups)
    return {label(group): messages for group, messages in found if _backend(group) not in _IN_ONE_PROCESS}


def _backend(group: ProcessGroup) -> str:
    import torch.distributed as dist

    return dist.get_backend(group)


def has_own_default(context: RankContext) -> bool:
    """Return whether the default process group is the one that the world was started with."""
    dist = _distributed()
    return dist is not None and context.default_group is not None and dist.group.WORLD is context.default_group


def created_count() -> int:
    """Return how many groups torch has numbered in this rank. torch derives the name of the next group from it."""
    return 0 if _distributed() is None else torch_api.created_groups()


def start_recorder(context: RankContext) -> None:
    """Start the thread that writes the record of collectives, unless it runs.

    Call this just before the first process group is created, not earlier: a process with threads is unsafe to fork.
    """
    if not context.recorder_started:
        context.recorder_started = True
        path = flight_path(context.session.directory, context.spec.world, context.rank)
        flight_recorder.watch(path, partial(_flight_record, context))


def _flight_record(context: RankContext) -> dict[str, object]:
    """Return torch's record of this rank's collectives, its groups' members and counts, and its place in the code.

    The record has no collectives if torch does not number the ranks as the world does, or records none: then it has
    torch's version. It says whether the rank has finished its test, and has what `diagnostics.deadlock` needs: the
    time, the group for whose last collective the rank waits, and how many collectives it has issued in each group whose
    numbers agree between ranks. The latter is empty if other threads of the rank may issue more.
    """
    position = {"place": place_of_main_thread(), "finished": not context.in_test}
    if not _is_numbered_as_its_world(context):
        return {"entries": [], **position}
    waiting = context.pending_work.awaited_group()
    record = torch_api.flight_record()
    if record is None:
        return {"entries": [], "unrecorded_by": torch_api.version(), **position}
    numbers = {label(group): number for group in all_groups() if (number := _sequence_number(group)) is not None}
    return {
        **record,
        "members": _members(),
        "numbers": numbers,
        **position,
        "now": wall_clock(),
        "waits_in": None if waiting is None else label(waiting),
        "issued": {name: numbers[name] for name in _countable_groups(context) if name in numbers},
    }


def _countable_groups(context: RankContext) -> list[str]:
    """Return the groups of this rank in which only its main thread issues, and only collectives of gloo.

    Called in the thread that writes the record. gloo numbers messages, too, so the numbers of collectives may differ
    between the ranks of a group that has any. Threads without a Python frame, such as gloo's own, issue nothing, except
    those of torch's RPC. Compiled code may send messages that are not counted.
    """
    import torch.distributed as dist

    others = _current_frames().keys() - {main_thread().ident, get_ident()}
    if others or (torch_api.rpc_initialisations() and torch_api.rpc_is_running()) or torch_api.compiles_messages():
        return []
    return [
        label(group)
        for group in all_groups()
        if set(dist.get_backend_config(group).split(",")) <= _ONLY_GLOO and not context.operations.has_messages(group)
    ]


def collectives_between(start: float, stop: float) -> tuple[CollectiveCall, ...]:
    """Return the collectives issued by this rank between two times (`time.time`), if torch's record still has them."""
    if not all_groups():
        return ()
    record = torch_api.flight_record() or {}
    found = (
        CollectiveCall(
            entry["profiling_name"],
            entry["collective_seq_id"],
            recorded_group(entry),
            entry["time_created_ns"] / 1e9,
            entry["time_discovered_completed_ns"] / 1e9,
        )
        for entry in record.get("entries", ())
        if not entry["is_p2p"]
    )
    return tuple(one for one in found if start <= one.issued <= stop)


def _is_numbered_as_its_world(context: RankContext) -> bool:
    """Return whether torch numbers the ranks as the world does. It does not in a group that only some ranks created."""
    dist = _distributed()
    if dist is None or not dist.is_initialized():
        return False
    if dist.group.WORLD is context.default_group:
        return True
    return bool((dist.get_rank(), dist.get_world_size()) == (context.rank, context.spec.ranks))
