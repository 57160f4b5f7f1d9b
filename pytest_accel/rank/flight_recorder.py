"""torch's record of a rank's collectives (flight recorder), which the rank writes to a file on a signal.

If a rank hangs, its main thread is in a native call, where Python signal handlers do not run. So a thread of the rank
waits for the signal, which is blocked in all others. torch records collectives of every backend if
`TORCH_FR_BUFFER_SIZE` is set before the first one (``torch/csrc/distributed/c10d/FlightRecorder.hpp``). It does not
record `send` and `recv` of gloo, nor the ranks of a group, so the rank adds the latter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from os import getpid, uname
from pathlib import Path
from signal import sigwait
from struct import error, unpack
from sys import _current_frames
from threading import get_ident, get_native_id, main_thread
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pytest_accel.core import threads, torch_api
from pytest_accel.core.clock import monotonic, wall_clock
from pytest_accel.core.flight_record import COLLECTIVES, FlightRecord, Wait
from pytest_accel.core.frames import place_of_main_thread
from pytest_accel.core.paths import flight_path
from pytest_accel.core.rank_names import recorded_group
from pytest_accel.core.record_events import CollectiveCall
from pytest_accel.core.signals import FLIGHT_SIGNAL
from pytest_accel.core.struct_messages import encode
from pytest_accel.rank.group_state import all_groups, has_own_default, is_numbered_as_its_world, label
from pytest_accel.rank.point_to_point import counter

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

VARIABLES = {"TORCH_FR_BUFFER_SIZE": "64"}
"""torch's variable that enables the record. The value, the number of collectives to keep, is more than anyone reads."""
_ONLY_GLOO = frozenset(("cpu:gloo", "cuda:gloo"))
"""The parts of the backend configuration of a group that uses gloo for all devices."""
_CALLS = {"x86_64": ("202", "232", "281"), "aarch64": ("98", "22")}
"""The numbers of the system calls futex(2), then epoll_wait(2) and epoll_pwait(2), by machine."""
_FLAGS, _WAIT_UNTIL, _WALL_CLOCK = 0xFF, 128 + 9, 256
"""Parts of the second argument of futex(2): FUTEX_PRIVATE_FLAG with FUTEX_WAIT_BITSET, and FUTEX_CLOCK_REALTIME."""
_STORE = "pt_tcpstore_uv"
"""Name of the thread that serves torch's store."""


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
            draft.write_bytes(encode(_flight_record(context)))
            draft.replace(path)


def _members() -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group to which this rank belongs, by the group's name."""
    import torch.distributed as dist

    return {label(group): tuple(dist.get_process_group_ranks(group)) for group in all_groups()}


def _flight_record(context: RankContext) -> FlightRecord:
    """Return torch's record of this rank's collectives, and what this rank has issued and waits for.

    It has nothing of these if torch does not number the ranks as the world does, or records no collectives.
    """
    at = FlightRecord(place=place_of_main_thread(), finished=not context.in_test)
    if not is_numbered_as_its_world(context):
        return at
    recorded = torch_api.flight_record()
    if recorded is None:
        return replace(at, unrecorded_by=torch_api.version())
    calls = {name: calls for name, (test, calls) in context.exchanges.items() if test == context.tests}
    wait = _exchange(context, calls) or _operation(context)
    return replace(
        at,
        entries=recorded.get("entries", []),
        members={"": tuple(range(context.spec.ranks)), **_members()},
        issued={"": calls, **{label(group): context.operations.counts(group) for group in all_groups()}},
        wait=wait,
        quiet=_quiet_time(context, wait),
    )


def _exchange(context: RankContext, calls: Mapping[str, int]) -> Wait | None:
    """Return the wait for other ranks in a `Gathering`; None if there is none."""
    if (name := context.awaited_exchange) is None:
        return None
    return Wait("exchange", "", calls.get(name, 0), tuple(range(context.spec.ranks)), (name,))


def _operation(context: RankContext) -> Wait | None:
    """Return the wait for a message or a collective of gloo; None if there is none."""
    import torch.distributed as dist

    operations = context.operations
    issued = None if (work := operations.awaited) is None else operations.works.get(work)
    group = None if issued is None else issued.group()
    if issued is None or group is None or not set(dist.get_backend_config(group).split(",")) <= _ONLY_GLOO:
        return None
    name, members = label(group), tuple(dist.get_process_group_ranks(group))
    if issued.channel is None:
        return Wait("collective", name, issued.number or 0, members, (COLLECTIVES,))
    receives, peer, tag = issued.channel
    own = dist.get_rank(group)
    if receives:
        peers = tuple(one for one in members if one != context.rank) if peer is None else (members[peer],)
        return Wait("receive", name, issued.number or 0, peers, (counter((False, own, tag)),), tag)
    counters = counter((True, own, tag)), counter((True, None, tag))
    return Wait("send", name, issued.number or 0, (members[peer or 0],), counters, tag)


def _quiet_time(context: RankContext, wait: Wait | None) -> float:
    """Return the seconds for which no thread of this rank goes on, and so issues an operation, by itself.

    It is 0 if that is unknown, or if compiled code may send messages, which are not counted. In the rank's main thread,
    only a wait for an operation has a limit that is known. There must be no other thread with a Python frame, but one
    of a C library may call Python later, and so do those of torch's RPC.
    """
    if torch_api.compiles_messages() or not has_own_default(context):
        return 0.0
    if _current_frames().keys() - {main_thread().ident, get_ident()}:
        return 0.0
    others = {one.name: one for one in Path("/proc/self/task").iterdir()}
    del others[str(get_native_id())]
    limit = math.inf
    if wait is None or wait.kind == "exchange":
        del others[str(getpid())]  # In older Pythons, `native_id` of the main thread is wrong after a fork.
    if wait is not None and wait.kind == "exchange" and context.store is not None:
        limit = context.store.timeout.total_seconds()  # type: ignore[attr-defined]
    return min([limit, *map(_sleeping_time, others.values())])


def _sleeping_time(thread: Path) -> float:
    """Return the seconds after which a thread, with this folder in ``/proc``, wakes if no other thread or rank acts.

    It is 0 if that is unknown. Threads of a process wait for each other in futex(2) with the flag for private ones; the
    fourth argument is the address of the time at which the wait ends, or 0. gloo's threads for connections always wait
    in epoll_wait(2) for 64 events at most and 10 ms; those of older releases of torch have no name.
    """
    try:
        if (thread / "comm").read_text(encoding="utf-8").strip() == _STORE:
            return math.inf
        call, *given = (thread / "syscall").read_text(encoding="utf-8").split()
        values = [int(one, 16) for one in given]
        futex, *epoll = _CALLS.get(uname().machine, ("",))
        if call in epoll and values[2:4] == [64, 10]:
            return math.inf
        if call != futex or values[1] & _FLAGS != _WAIT_UNTIL:
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
