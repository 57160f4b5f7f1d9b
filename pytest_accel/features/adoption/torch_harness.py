"""Execution of torch's ``MultiProcessTestCase`` in ranks that are already running, instead of new processes.

In torch (``torch/testing/_internal/common_distributed.py`` of torch 2.13), a parent process runs ``setUp``, which
starts a process for each rank. Each child creates the test case again, runs its method without ``setUp`` and
``tearDown``, and exits. The parent checks the exit codes and runs ``tearDown``. Here, each rank runs both parts: where
the parent would join its processes, the rank runs the child's part, with the file name and the environment that rank 0
would have given to its children.
"""

from __future__ import annotations

import contextlib
import json
import os
import unittest
from collections.abc import Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_accel.rank import flight_recorder, process_group, rank_environment

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext
    from pytest_accel.rank.signed_store import SignedStore

_NAMES_THE_TEST = "PYTEST_CURRENT_TEST"
_SKIP_TIMEOUT = timedelta(seconds=10)
"""Time that a rank waits for the others after it has skipped the test: with its groups, as below, and in rank 0 before
its `tearDown` may remove their files.

The time is limited, because ranks that have not skipped the test may never end it.
"""

_GROUP_TIMEOUT = timedelta(seconds=1)
"""Time for which a rank that has passed keeps its groups for others that may still be connecting to it.

torch's functions that create a group return as soon as this rank is connected; if it closed the connections at once, a
slower rank would fail. The time is short, because in some tests a rank exits and never connects.
"""


class _Start(NamedTuple):
    """The data with which rank 0 would start its children."""

    file_name: str
    environment: dict[str, str | None]
    """The variables that rank 0 has changed; None: unset."""


class HarnessInRank:
    """Pytest plugin that runs test cases of torch in this rank which would otherwise start a process for each rank.

    Each rank makes one instance, and registers it if the suite's own tests are adopted (`suite_adoption.py`).
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._identity = rank_environment.identity(context.spec, context.rank, port=0).keys()
        """Names of the variables that identify the rank.

        torch's harness sets none of them: it passes the rank to the test case only.
        """
        self._original_environment = {name: value for name, value in os.environ.items() if name not in self._identity}
        self._harness: Any = None
        self._start_processes: Any = None
        """torch's own `_start_processes`."""
        self._join_processes: Any = None
        """torch's own `_join_processes`."""
        self._files: list[str] = []
        """Files of the running test, which torch does not remove."""

    def install(self, harness: Any) -> None:
        """Replace the functions of torch's module that start and join processes; no-op if that has been done."""
        if self._harness is not None:
            return
        self._harness, case = harness, harness.MultiProcessTestCase
        self._start_processes, self._join_processes = case._start_processes, case._join_processes
        case._start_processes = _record_start
        case._join_processes = lambda case, fn: self._join(case, fn)
        case.run_test = lambda case, test_name, parent_pipe: self._run_test(case, test_name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Unset the variables that identify the rank, as in torch's parent process; restore them after the test."""
        __tracebackhide__ = True
        base = getattr(self._harness, "MultiProcessTestCase", None)
        case: Any = getattr(item, "cls", None)
        if base is None or case is None or not issubclass(case, base) or case.join_or_run is not base.join_or_run:
            return (yield)
        for hidden in self._identity:
            os.environ.pop(hidden, None)
        try:
            return (yield)
        finally:
            for name, value in self._context.variables.items():
                if value is None:
                    os.environb.pop(name, None)
                elif os.environb.get(name) != value:
                    os.environb[name] = value
            while self._files:
                Path(self._files.pop()).unlink(missing_ok=True)

    def _join(self, case: Any, function: Any) -> None:
        """Run the child's part in this rank, where torch's parent process would join its children."""
        __tracebackhide__ = True
        self._files.append(case.file_name)
        start = self._agree(case)
        if start is None:
            raise unittest.SkipTest("its setUp has started no processes")
        if function in case.skip_return_code_checks or function in case.special_return_code_checks:
            self._run_as_torch(case, function)
            return
        ranks = self._context.spec.ranks
        assert int(case.world_size) == ranks, f"the test case's world_size is {case.world_size}, its world has {ranks}"
        flight_recorder.start(self._context)
        try:
            with _environment(self._child_environment(start.environment)):
                self._run_child(case, start.file_name)
        except unittest.SkipTest:
            self._end(_SKIP_TIMEOUT, _SKIP_TIMEOUT)
            raise
        self._end(_GROUP_TIMEOUT, process_group.GROUP_TIMEOUT)

    def _agree(self, case: Any) -> _Start | None:
        """Return rank 0's data for all ranks; None if its `setUp` has started no processes."""
        __tracebackhide__ = True
        key = self._key("start")
        if self._context.rank == 0:
            environment = getattr(case, "_accel_environment", None)
            start = None if environment is None else _Start(case.file_name, self._changes(environment))
            self._store.set(key, json.dumps(start).encode())
            return start
        fields = json.loads(self._store.get(key))
        return None if fields is None else _Start(*fields)

    def _changes(self, environment: dict[str, str]) -> dict[str, str | None]:
        """Return the variables in `environment` that differ from this rank's original environment."""
        original = self._original_environment
        names = (environment.keys() | original.keys()) - {_NAMES_THE_TEST}
        return {name: environment.get(name) for name in names if environment.get(name) != original.get(name)}

    def _child_environment(self, changes: dict[str, str | None]) -> dict[str, str]:
        """Return this rank's original environment with rank 0's `changes`."""
        changed = {**self._original_environment, _NAMES_THE_TEST: os.environ.get(_NAMES_THE_TEST), **changes}
        return {name: value for name, value in changed.items() if value is not None}

    def _run_child(self, case: Any, file_name: str) -> None:
        """Run the function that torch runs in each child process; raise a skip or an error for its exit status."""
        __tracebackhide__ = True
        options = {"fake_pg": True} if getattr(case, "fake_pg", False) else {}
        try:
            type(case)._run(self._context.rank, case._current_test_name(), file_name, None, **options)
        except SystemExit as end:
            for skip in self._harness.TEST_SKIPS.values():
                if end.code == skip.exit_code:
                    raise unittest.SkipTest(skip.message) from None
            if end.code not in (None, 0):
                raise RuntimeError(f"the rank called sys.exit({end.code!r})") from end

    def _run_test(self, case: Any, test: str) -> None:
        """Run the test's method as torch's `run_test` does, without its exit codes and its thread for timeouts."""
        __tracebackhide__ = True
        if hasattr(self._harness, "common_utils"):  # torch 2.8 and older set no seed here.
            self._harness.common_utils.set_rng_seed()
        getattr(case, test)()

    def _end(self, group_timeout: timedelta, timeout: timedelta) -> None:
        """Destroy the groups, as a child's exit would. In rank 0, wait for the other ranks, as the parent does."""
        self._wait_for_all("left", group_timeout)
        _destroy_groups()
        self._wait_for_all("ended", timeout if self._context.rank == 0 else None)
        if self._context.rank == 0:
            for key in (self._key("start"), *self._keys("left"), *self._keys("ended")):
                self._store.delete(key)

    def _wait_for_all(self, event: str, timeout: timedelta | None) -> None:
        """Announce that this rank has reached `event`; wait up to `timeout` until all have, or not at all if None."""
        __tracebackhide__ = True
        keys = self._keys(event)
        self._store.set(keys[self._context.rank], b"")
        if timeout is None:
            return
        try:
            self._store.wait(keys, timeout)
        except RuntimeError:  # torch's DistStoreError, after the timeout, is a RuntimeError.
            return
        for key in keys:
            self._store.get(key)

    @property
    def _store(self) -> SignedStore:
        assert self._context.signed_store is not None
        return self._context.signed_store

    def _key(self, name: str) -> str:
        return f"adopted {self._context.tests} {name}"

    def _keys(self, event: str) -> list[str]:
        """Return the keys with which the ranks announce `event`, in the order of the ranks."""
        return [self._key(f"{event} {rank}") for rank in range(self._context.spec.ranks)]

    def _run_as_torch(self, case: Any, function: Any) -> None:
        """Run a test that expects its processes to die: as in torch, in new processes, which rank 0 starts."""
        __tracebackhide__ = True
        if self._context.rank == 0:
            self._start_processes(case, case._accel_process)
            self._join_processes(case, function)


def _record_start(case: Any, process: Any) -> None:
    """Record the environment that the children would inherit, instead of starting them as `_start_processes` does."""
    case._accel_environment = dict(os.environ)
    case._accel_process = process


@contextlib.contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """Set the environment to `wanted` in the ``with`` block, and restore it afterwards."""
    before = dict(os.environ)
    _set_environment(wanted)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(wanted: dict[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _destroy_groups() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
