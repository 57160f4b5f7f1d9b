"""A rank's process groups, and torch's record of their collectives, which the rank writes to a file on a signal.

If a rank hangs, its main thread is in a native call, where Python signal handlers do not run. So a thread of the rank
waits for the signal, which is blocked in all others. torch records collectives of every backend if
`TORCH_FR_BUFFER_SIZE` is set before the first one (``torch/csrc/distributed/c10d/FlightRecorder.hpp``). It does not
record `send` and `recv` of gloo, nor the ranks of a group, which are added here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from os import getpid, uname
from pathlib import Path
from signal import sigwait
from struct import error, unpack
from sys import _current_frames
from threading import get_ident, get_native_id, main_thread
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pytest_accel.compat import torch_api
from pytest_accel.core import threads
from pytest_accel.core.clock import monotonic, wall_clock
from pytest_accel.core.frames import place_of_main_thread
from pytest_accel.core.record_events import CollectiveCall
from pytest_accel.core.session_folder import rank_path
from pytest_accel.core.signals import FLIGHT_SIGNAL
from pytest_accel.core.truncation import DEFAULT_GROUP
from pytest_accel.messages.flight_record import Collective, FlightRecord, RankWait, to_json
from pytest_accel.messages.rank_messages import GroupUse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pytest_accel.rank.context import RankContext

VARIABLES = {"TORCH_FR_BUFFER_SIZE": "64"}
"""torch's variable that enables the record. The value, the number of collectives to keep, is more than anyone reads."""
_TYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
"""Name of a `torch.dtype` by c10's name of the type."""
_CALLS = {"x86_64": ("202", "219", "232", "281"), "aarch64": ("98", "128", "22")}
"""The numbers of the system calls futex(2), restart_syscall(2), then epoll_wait(2) and epoll_pwait(2), by machine."""
_FLAGS, _WAIT_UNTIL, _WALL_CLOCK = 0xFF, 128 + 9, 256
"""Parts of the second argument of futex(2): FUTEX_PRIVATE_FLAG with FUTEX_WAIT_BITSET, and FUTEX_CLOCK_REALTIME."""
_STORE = "pt_tcpstore_uv"
"""Name of the thread that serves torch's store."""


@cache
def start(context: RankContext) -> None:
    """Start the thread that writes the record of collectives, unless it runs.

    Call this just before the first process group is created, not earlier: a process with threads is unsafe to fork.
    """
    if FLIGHT_SIGNAL is not None:
        with suppress(threads.NoThreadError):  # Reports of hangs name no collectives then.
            threads.start(_write_on_signal, "accel-flight", context, FLIGHT_SIGNAL)


def _write_on_signal(context: RankContext, number: int) -> None:
    path = rank_path(context.session.directory, context.spec.world, context.rank, "flight")
    while True:
        sigwait({number})
        # An error here must not fail a test, and there is no way to report it. The record is missing then.
        with suppress(Exception):
            draft = Path(f"{path}.new")
            draft.write_bytes(to_json(_flight_record(context)))
            draft.replace(path)


def _flight_record(context: RankContext) -> FlightRecord:
    """Return torch's record of this rank's collectives, and what this rank has issued and waits for.

    These fields are empty if torch does not number the ranks as the world does, or records no collectives.
    """
    at = FlightRecord(place=place_of_main_thread(), finished=not context.in_test)
    if not is_numbered_as_its_world(context):
        return at
    recorded = torch_api.flight_record()
    if recorded is None:
        return replace(at, unrecorded_by=torch_api.version())
    own, ranks, name = uses(context), tuple(range(context.spec.ranks)), context.awaited_exchange
    wait = RankWait("exchange", name, context.exchanges[name], ranks) if name else _operation(context)
    return replace(
        at,
        collectives=collectives_in(recorded.get("entries", ()), own),
        uses=own,
        exchanges=dict(context.exchanges),
        wait=wait,
        quiet=_quiet_time(context, wait),
    )


def collectives_in(
    entries: Iterable[Mapping[str, Any]], uses: Mapping[str, GroupUse]
) -> dict[str, dict[int, Collective]]:
    """Return the collectives in the `entries` of torch's record, by group and number.

    `uses` are the operations that this rank has issued in each of its groups.
    """
    found: dict[str, dict[int, Collective]] = {}
    issued = {group: use.collectives for group, use in uses.items() if use.collectives is not None}
    for entry in entries:
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL, entries of a group and of the helper that checks it have no name.
        if entry["is_p2p"] or not entry["process_group"][0]:
            continue
        one = Collective(
            group=_group_of(entry),
            number=entry["collective_seq_id"],
            operation=entry["profiling_name"].rpartition(":")[2],
            types=tuple(_TYPES.get(kind, kind) for kind in entry["input_dtypes"]),
            shapes=tuple(map(tuple, entry["input_sizes"])),
            done=entry["retired"] or entry["state"] == "completed",
        )
        # An entry with a higher number belongs to an earlier group of this name.
        if one.number <= issued.get(one.group, one.number):
            found.setdefault(one.group, {})[one.number] = one
    return found


def _group_of(entry: Mapping[str, Any]) -> str:
    """Return the name of the group in which torch's flight recorder has recorded the collective `entry`.

    The description of all groups but the default group is ``undefined``, unless the test has given a description.
    """
    name, description = entry["process_group"]
    return DEFAULT_GROUP if description == DEFAULT_GROUP else str(name)


def _operation(context: RankContext) -> RankWait | None:
    """Return the wait for a message or a collective of gloo; None if there is none."""
    import torch.distributed as dist

    if (awaited := context.operations.awaited) is None:
        return None
    find, channel, number = awaited
    group = find()
    if group is None or number is None or group.name() != "gloo":
        return None
    name, members = label(group), tuple(dist.get_process_group_ranks(group))
    if channel is None:
        return RankWait("collective", name, number, members)
    receives, peer, tag = channel
    own = dist.get_rank(group)
    if receives:
        peers = tuple(one for one in members if one != context.rank) if peer is None else (members[peer],)
        return RankWait("receive", name, number, peers, ((False, own, tag),), tag)
    return RankWait("send", name, number, (members[peer or 0],), ((True, own, tag), (True, None, tag)), tag)


def _quiet_time(context: RankContext, wait: RankWait | None) -> float:
    """Return the seconds for which this rank issues no operation unless another rank acts; 0 if that is unknown.

    In the rank's main thread, only a wait for an operation has a limit that is known.
    """
    others = _current_frames().keys() - {main_thread().ident, get_ident()}
    # Another thread with a Python frame may issue operations at any time.
    if others or not has_own_default(context):
        return 0.0
    left_out, limit, store = {get_native_id()}, math.inf, context.store
    if wait is None or wait.kind == "exchange":
        left_out.add(getpid())  # In older Pythons, `native_id` of the main thread is wrong after a fork.
        limit = store.timeout.total_seconds() if wait and store else limit  # type: ignore[attr-defined]
    # Threads without a Python frame, such as those of a C library or of torch's RPC, may call Python when they wake.
    threads = [one for one in Path("/proc/self/task").iterdir() if int(one.name) not in left_out]
    return min([limit, *map(_sleeping_time, threads)])


def _sleeping_time(thread: Path) -> float:
    """Return the seconds after which the thread with this folder in ``/proc`` wakes if no other thread or rank acts.

    The result is 0 if that is unknown. Threads of a process wait for each other in futex(2) with the flag for private
    futexes; the fourth argument is the address of the time at which the wait ends, or 0.
    """
    try:
        if (thread / "comm").read_text(encoding="utf-8").strip() == _STORE:
            return math.inf
        call, *given = (thread / "syscall").read_text(encoding="utf-8").split()
        values = [int(one, 16) for one in given]
        futex, restart, *epoll = _CALLS.get(uname().machine, ("", ""))
        # gloo's threads for connections, which have no name in older releases of torch, always wait in epoll_wait(2)
        # for 64 events at most and 10 ms.
        if call in epoll and values[2:4] == [64, 10]:
            return math.inf
        # When a stopped process goes on (SIGCONT), the kernel restarts a wait that has a limit, with its arguments.
        if call not in (futex, restart) or values[1] & _FLAGS != _WAIT_UNTIL:
            return 0.0
        if values[3] == 0:
            return math.inf
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(values[3])
            seconds, _ = unpack("qq", memory.read(16))
        return float(seconds - (wall_clock() if values[1] & _WALL_CLOCK else monotonic()))
    except (OSError, ValueError, error):
        return 0.0  # For example, the thread has ended.


def collectives_between(start: float, stop: float) -> tuple[CollectiveCall, ...]:
    """Return the collectives issued by this rank between two times (`time.time`), if torch's record still has them."""
    if not torch_api.groups():
        return ()
    record = torch_api.flight_record() or {}
    found = (
        CollectiveCall(
            entry["profiling_name"],
            entry["collective_seq_id"],
            _group_of(entry),
            entry["time_created_ns"] / 1e9,
            entry["time_discovered_completed_ns"] / 1e9,
        )
        for entry in record.get("entries", ())
        if not entry["is_p2p"]
    )
    return tuple(one for one in found if start <= one.issued <= stop)


def label(group: ProcessGroup) -> str:
    """Return the name of `group`; `DEFAULT_GROUP` for the default group."""
    return DEFAULT_GROUP if group is torch_api.default_group() else str(group.group_name)


def labels(names: frozenset[str]) -> list[str]:
    """Return the label of each existing process group with one of the `names`.

    Groups of a device mesh are left out: torch has no function to destroy them.
    """
    groups = [group for group, name in torch_api.groups().items() if name in names] if names else []
    return [label(group) for group in groups if not group.group_desc.startswith("mesh_")]


def uses(context: RankContext) -> dict[str, GroupUse]:
    """Return what this rank has issued in each of its groups, by the group's name.

    The result is empty if torch does not number the ranks as the world does: then equal names do not mean the same
    group on all ranks.
    """
    if not is_numbered_as_its_world(context):
        return {}
    import torch.distributed as dist

    issued = context.operations
    return {
        label(group): GroupUse(
            tuple(dist.get_process_group_ranks(group)), issued.collectives(group), issued.messages(group)
        )
        for group in torch_api.groups()
    }


def reaches_store(context: RankContext) -> bool:
    """Return whether this rank is still connected to the world's store, if tests use it.

    torch's server ends the connection when a key or a value is too large, and torch does not connect again.
    """
    # To ask the server after each test would take a tenth of the test's time, and more on a busy machine.
    if context.store is None or not context.lends_store:
        return True
    try:
        context.store.check(["accel"])
    except RuntimeError:
        return False
    return True


def has_own_default(context: RankContext) -> bool:
    """Return whether the default process group is still the group that the world was started with."""
    return context.default_group is not None and torch_api.default_group() is context.default_group


def is_numbered_as_its_world(context: RankContext) -> bool:
    """Return whether torch numbers the ranks as the world does. It does not if only some ranks created the group."""
    group = torch_api.default_group()
    if group is None or group is context.default_group:
        return group is not None
    return (group.rank(), group.size()) == (context.rank, context.spec.ranks)
