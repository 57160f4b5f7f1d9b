"""Leak check: after each test, find what the call of the test left behind in its rank, and report it.

A thing that is new after the call and still there after the teardown is a leak of the test. Things that fixtures start,
set or allocate exist before the call, or are gone after the teardown.

The check ends nothing that the suite may still use: processes, threads and process groups stay as long as the rank. It
puts settings back. The driver replaces the ranks, which takes a tenth of a second, if a leak would make later tests
wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from gc import collect
from os import getpid, waitid
from pathlib import PurePath
from threading import Thread, main_thread
from threading import enumerate as living_threads
from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from pytest_accel.compat import torch_api
from pytest_accel.compat.pytest_shims import is_fixture_of_tool, requested_fixtures
from pytest_accel.core.clock import monotonic
from pytest_accel.core.processes import (
    SHM_MANAGER,
    children_of,
    is_computing,
    is_thread_computing,
    resource_tracker_pid,
)
from pytest_accel.core.truncation import DEFAULT_GROUP, cut_end
from pytest_accel.messages.rank_messages import Finished, Leak, LeakKind
from pytest_accel.rank import group_state, process_state
from pytest_accel.rank.device_memory import allocated_memory, grown_memory, peak_memory

if TYPE_CHECKING:
    import pytest

    from pytest_accel.rank.context import RankContext
    from pytest_accel.rank.torch_devices import FailedWork

_MOST_GROUPS = 100
"""Number of process groups that there may be in a rank. Each has connections to the other ranks.

Tests that make a device mesh leave its groups, because torch has no function to destroy them.
"""
_PLAIN = (str, bytes, int, float, PurePath)
"""Types of values, such as the address of a server, through which a fixture keeps nothing."""
_INTERVAL = 0.005
"""Seconds between two looks at the processes and threads that may still end."""
_GRACE = 40
"""Number of looks in a row at which no process or thread computes, after which the test has left them running.

The workers of an iterator or a thread at its last line need this time. It is counted in looks because on a busy machine
they get no more of the processor than this process does.
"""
_LONGEST_GRACE = 5.0
"""Seconds after which the test has left processes and threads running even if they compute."""
_LIBRARIES = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "multiprocess.forkserver",
    "multiprocess.resource_tracker",
    "torch/_inductor/compile_worker",
    "loky.backend.",  # joblib's reusable executor and its tracker; also matches `joblib.externals.loky`.
    "wandb-core",
    "debugpy",
    SHM_MANAGER,
)
"""Texts in the command lines of processes that a library keeps until its process exits, and terminates itself."""
_EXECUTOR = os.path.join("concurrent", "futures", "thread.py")
"""End of the path of the module with the function that workers of a `ThreadPoolExecutor` run."""
_LOKY = "loky.process_executor"
"""End of the name of the module with the threads of loky's reusable executor. They keep running with its processes."""

Spawned = frozenset[int | Thread]
"""Running child processes (by process id), and non-daemon threads, for which the interpreter would wait at exit."""


class _Seen(NamedTuple):
    """The state of the process at one moment. With ``accel_leaks = off``, the first two are empty."""

    spawned: Spawned
    settings: process_state.State
    groups: frozenset[str]
    """The names of the process groups."""
    created: int
    """Number of groups that torch has created."""
    rpc: int
    """Number of RPC initialisations."""


class LeakCheck:
    """The check for leaks in one rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._is_on = context.session.leaks != "off"
        self._before: _Seen | None = None
        """The state before the call of the test; None if its call has not begun."""
        self._memory: dict[str, int] = {}
        """The bytes that torch had allocated on each device before the call."""
        self._after: _Seen
        """The state after the call."""
        self._fixtures: list[Any] = []
        """The fixtures of a wider scope that the test uses, or that the last test has used."""

    def before_call(self) -> None:
        """Look at the process before the call of the test."""
        if self._before is None:  # A plugin may call a test more than once.
            self._memory = allocated_memory(self._context) if self._is_on else {}
            self._before = self._look()

    def after_call(self, item: pytest.Item) -> None:
        """Look at the process after the call of the test `item`."""
        self._after = self._look()
        self._fixtures = [one for one in requested_fixtures(item) if one.scope != "function"]

    def _look(self) -> _Seen:
        grouped = self._context.spec.key.grouped
        return _Seen(
            find() if self._is_on else frozenset(),
            process_state.read() if self._is_on else (),
            frozenset(torch_api.groups().values()) if grouped else frozenset(),
            torch_api.created_groups() if grouped else 0,
            torch_api.rpc_initialisations(),
        )

    def end(self, failed_work: FailedWork | None, *, is_expected: bool) -> Finished:
        """Put settings back after the teardown of the test; return its last message, which has its leaks.

        `failed_work` is work on a device that has failed, after which the device is unusable for this process;
        `is_expected` is True if the test has not failed.
        """
        found: list[Leak] = []
        before, self._before = self._before, None
        groups_by_test, context = 0, self._context
        if before is not None:
            found = self._leaks(before, self._after, may_use_devices=failed_work is None)
            if group_state.has_own_default(context):  # Otherwise, torch has begun to count again.
                groups_by_test = self._after.created - before.created
        return Finished(
            leaks=tuple(sorted(found, key=lambda leak: leak.lasting)),  # Leaks for which ranks are replaced come last.
            # The test has seen the error, or has failed because of it, so the error is no leak.
            device_error="" if failed_work is None else str(failed_work),
            uses=group_state.uses(context),
            groups=torch_api.created_groups(),
            groups_by_test=groups_by_test,
            doubt=self._doubt(failed_work if is_expected else None),
            unawaited=context.operations.end(),
            properties=peak_memory(context),
        )

    def _leaks(self, before: _Seen, after: _Seen, *, may_use_devices: bool) -> list[Leak]:
        """Return what is new since `before`, was there in `after`, and is still there; look only for what may be."""
        found: list[Leak] = []
        if before.settings != after.settings:
            found += process_state.restore(before.settings, after.settings)
        if not any(map(_may_keep, self._fixtures)):  # Such a fixture ends later what it has kept of the call.
            if spawned := after.spawned - before.spawned:
                found += left_running(spawned & find())
            # With a default process group in place, the next test could not make its own.
            groups = [] if self._context.keeps_groups else group_state.labels(after.groups - before.groups)
            found += [Leak(LeakKind.GROUP, label, lasting=label == DEFAULT_GROUP) for label in groups]
            if self._is_on and may_use_devices:  # torch cannot free all memory of an unusable device.
                found += grown_memory(self._context, self._memory)
        if after.rpc != before.rpc and torch_api.rpc_is_running():
            found.append(Leak(LeakKind.RPC, lasting=True))
        return found

    def _doubt(self, failed_work: FailedWork | None) -> str:
        """Return why the rank should not run another test, although this test did nothing wrong; empty if it may.

        `failed_work` is what the test has expected.
        """
        context = self._context
        if failed_work is not None and failed_work.seen:
            return f"the test expected an error of a device, which is unusable now: {failed_work}"
        if context.default_group is not None and not group_state.has_own_default(context):
            return "the test destroyed or replaced the world's default process group"
        if torch_api.rpc_initialisations() and not torch_api.rpc_is_running():
            return "torch.distributed.rpc was shut down, and cannot be started again in the same processes"
        if len(torch_api.groups()) > _MOST_GROUPS:
            return f"there are more than {_MOST_GROUPS} process groups"
        if context.operations.take_failure():
            return "an operation of torch.distributed failed, which may have closed the connections of its group"
        if not group_state.reaches_store(context):
            return "the connection to the world's store was lost"
        return ""


def _may_keep(fixture: Any) -> bool:
    """Return whether a `pytest.FixtureDef` is set up and may keep what a test has started."""
    result = fixture.cached_result
    if result is None or is_fixture_of_tool(fixture):
        return False
    return result[0] is not None and not isinstance(result[0], _PLAIN)


def find() -> Spawned:
    """Return the running children and non-daemon threads of this process.

    On Linux, the children include orphaned descendants, because a rank is a subreaper.
    """
    me = main_thread()
    return _children().union(thread for thread in living_threads() if not thread.daemon and thread is not me)


def _children() -> frozenset[int]:
    try:
        waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()  # The usual case, for which waitid() is the cheapest check.
    return children_of(getpid())


def left_running(spawned: Spawned) -> list[Leak]:
    """Return a leak for each of the processes and threads that does not end by itself soon.

    Processes with a text of `_LIBRARIES` in their command lines, and idle threads of executors, are left out.
    """
    if not spawned:
        return []
    collect()
    deadline = monotonic() + _LONGEST_GRACE
    idle = 0
    while True:
        children = _running(one for one in spawned if isinstance(one, int))
        threads = [one for one in spawned if isinstance(one, Thread) and one.is_alive() and not _may_stay(one)]
        if not (children or threads) or idle == _GRACE or monotonic() > deadline:
            break
        computing = any(map(_is_tree_computing, children)) or any(
            is_thread_computing(one.native_id or 0) for one in threads
        )
        idle = 0 if computing else idle + 1
        sleep(_INTERVAL)
    return [
        *(Leak(LeakKind.PROCESS, cut_end(words, 80), number=pid) for pid, words in children.items()),
        *(Leak(LeakKind.THREAD, thread.name) for thread in threads),
    ]


def _running(pids: Iterable[int]) -> dict[int, str]:
    """Return the command lines of the running processes of `pids` that no library keeps."""
    found = {}
    for pid in sorted(pids):
        with suppress(psutil.Error):
            child = psutil.Process(pid)
            words = " ".join(child.cmdline()) or child.name()
            is_of_library = pid == resource_tracker_pid() or any(text in words for text in _LIBRARIES)
            if child.status() != psutil.STATUS_ZOMBIE and not is_of_library:
                found[pid] = words
    return found


def _is_tree_computing(pid: int) -> bool:
    """Return whether the process or a descendant, for which it may wait, computes."""
    return is_computing(pid) or any(map(_is_tree_computing, children_of(pid)))


def _may_stay(thread: Thread) -> bool:
    """Return whether `thread` cannot disturb the next test: loky's, or an executor's worker that waits for work."""
    if type(thread).__module__.endswith(_LOKY):
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    code = frame.f_code if frame is not None else None
    return code is not None and code.co_name == "_worker" and code.co_filename.endswith(_EXECUTOR)
