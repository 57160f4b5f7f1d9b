"""torch's record of a rank's collectives (flight recorder), which the rank writes to a file on a signal.

If a rank hangs, its main thread is in a native call, where Python signal handlers do not run. So a thread of the rank
waits for the signal, which is blocked in all others. torch records collectives of every backend if
`TORCH_FR_BUFFER_SIZE` is set before the first one (``torch/csrc/distributed/c10d/FlightRecorder.hpp``). It does not
record `send` and `recv` of gloo, nor the ranks of a group, so the rank adds the latter.
"""

from __future__ import annotations

from contextlib import suppress
from json import dumps
from pathlib import Path
from signal import sigwait
from sys import _current_frames
from threading import get_ident, main_thread
from typing import TYPE_CHECKING

from pytest_accel.core import threads, torch_api
from pytest_accel.core.clock import wall_clock
from pytest_accel.core.frames import place_of_main_thread
from pytest_accel.core.paths import flight_path
from pytest_accel.core.rank_names import recorded_group
from pytest_accel.core.record_events import CollectiveCall
from pytest_accel.core.signals import FLIGHT_SIGNAL
from pytest_accel.rank.group_state import all_groups, is_numbered_as_its_world, label, sequence_number

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

VARIABLES = {"TORCH_FR_BUFFER_SIZE": "64"}
"""torch's variable that enables the record. The value, the number of collectives to keep, is more than anyone reads."""
_ONLY_GLOO = frozenset(("cpu:gloo", "cuda:gloo"))
"""The parts of the backend configuration of a group that uses gloo for all devices."""


def start(context: RankContext) -> None:
    """Start the thread that writes the record of collectives, unless it runs.

    Call this just before the first process group is created, not earlier: a process with threads is unsafe to fork.
    """
    if not context.recorder_started:
        context.recorder_started = True
        if FLIGHT_SIGNAL is not None:
            with suppress(threads.NoThreadError):  # Reports of hangs name no collectives then.
                threads.start(_write_on_signal, "accel-flight", context, FLIGHT_SIGNAL)


def _write_on_signal(context: RankContext, number: int) -> None:
    path = flight_path(context.session.directory, context.spec.world, context.rank)
    while True:
        sigwait({number})
        # An error here must not fail a test, and there is no way to report it. The record is missing then.
        with suppress(Exception):
            draft = Path(f"{path}.new")
            draft.write_text(dumps(_flight_record(context)), encoding="utf-8")
            draft.replace(path)


def _members() -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group to which this rank belongs, by the group's name."""
    import torch.distributed as dist

    return {label(group): tuple(dist.get_process_group_ranks(group)) for group in all_groups()}


def _flight_record(context: RankContext) -> dict[str, object]:
    """Return torch's record of this rank's collectives, its groups' members and counts, and its place in the code.

    The record has no collectives if torch does not number the ranks as the world does, or records none: then it has
    torch's version. It says whether the rank has finished its test, and has what `diagnostics.deadlock` needs: the
    time, the group for whose last collective the rank waits, and how many collectives it has issued in each group whose
    numbers agree between ranks. The latter is empty if other threads of the rank may issue more.
    """
    position = {"place": place_of_main_thread(), "finished": not context.in_test}
    if not is_numbered_as_its_world(context):
        return {"entries": [], **position}
    waiting = context.pending_work.awaited_group()
    record = torch_api.flight_record()
    if record is None:
        return {"entries": [], "unrecorded_by": torch_api.version(), **position}
    numbers = {label(group): number for group in all_groups() if (number := sequence_number(group)) is not None}
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
