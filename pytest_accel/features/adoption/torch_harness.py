"""Execution of torch's ``MultiProcessTestCase`` in ranks that are already running, instead of new processes.

In torch (``torch/testing/_internal/common_distributed.py`` of torch 2.13), a parent process runs ``setUp``, which
starts a process for each rank. Each child creates the test case again, runs its method without ``setUp`` and
``tearDown``, and exits. The parent checks the exit codes and runs ``tearDown``. Here, each rank runs both parts: where
the parent would join its processes, the rank runs the child's part, with the file name and the environment that rank 0
would have given to its children.
"""

from __future__ import annotations

import json
import os
import unittest
from collections.abc import Generator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.features.adoption.suite_adoption import harness_of
from pytest_accel.rank import flight_recorder, process_group, rank_environment

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

_NAMES_THE_TEST = "PYTEST_CURRENT_TEST"
_SKIP_TIMEOUT = timedelta(seconds=10)  # for the others, which may never end the test that this rank has skipped
_GROUP_TIMEOUT = timedelta(seconds=1)
"""Time for which a rank that has passed keeps its groups for others that may still be connecting to it.

torch's functions that create a group return as soon as this rank is connected; if it closed the connections at once, a
slower rank would fail. The time is short, because in some tests a rank exits and never connects.
"""


class HarnessInRank:
    """Pytest plugin that runs test cases of torch in this rank which would otherwise start a process for each rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._identity = rank_environment.identity(context.spec, context.rank, port=0).keys()
        """Names of the variables that identify the rank. torch passes the rank to the test case only."""
        self._original = {name: value for name, value in os.environ.items() if name not in self._identity}
        self._harness: Any = None
        self._files: list[str] = []
        """Files of the running test, which torch does not remove."""

    def _replace_functions(self, harness: Any) -> None:
        self._harness, case = harness, harness.MultiProcessTestCase
        self._start_processes, self._join_processes = case._start_processes, case._join_processes
        case._start_processes = _record_start
        case._join_processes = lambda case, function: self._join(case, function)
        case.run_test = lambda case, test_name, parent_pipe: self._run_test(case, test_name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Unset the variables that identify the rank, as in torch's parent process; restore them after the test."""
        __tracebackhide__ = True
        harness = harness_of(item)
        if harness is None:
            return (yield)
        if self._harness is None:
            self._replace_functions(harness)
        hidden = {name: os.environ.pop(name) for name in self._identity if name in os.environ}
        try:
            return (yield)
        finally:
            os.environ.update(hidden)
            while self._files:
                Path(self._files.pop()).unlink(missing_ok=True)

    def _join(self, case: Any, function: Any) -> None:
        """Run the child's part in this rank, where torch's parent process would join its children."""
        __tracebackhide__ = True
        context = self._context
        self._files.append(case.file_name)
        if context.rank == 0:
            found, changes = vars(case).get("_accel_environment"), None
            if found is not None:  # Not the whole environment, which may have secrets: others can read the store.
                names = [name for name in found | self._original if name != _NAMES_THE_TEST]
                changes = {name: found.get(name) for name in names if found.get(name) != self._original.get(name)}
            self._store.set(self._key("start"), json.dumps([case.file_name, changes]).encode())
        file_name, changes = json.loads(self._store.get(self._key("start")))
        if changes is None:
            raise unittest.SkipTest("its setUp has started no processes")
        if function in case.skip_return_code_checks or function in case.special_return_code_checks:
            if context.rank == 0:  # Its processes are to die: as in torch, they are new ones.
                self._start_processes(case, case._accel_process)
                self._join_processes(case, function)
            return
        size, ranks = int(case.world_size), context.spec.ranks
        assert size == ranks, f"the test case's world_size is {size}, its world has {ranks}"
        flight_recorder.start(context)
        try:
            self._run_child(case, file_name, changes)
        except BaseException as error:
            # The others do not wait for a rank that fails, which leaves its groups as they are.
            timeout = _SKIP_TIMEOUT if isinstance(error, unittest.SkipTest) else None
            self._leave(timeout, timeout)
            raise
        self._leave(_GROUP_TIMEOUT, process_group.GROUP_TIMEOUT)

    def _leave(self, group_timeout: timedelta | None, timeout: timedelta | None) -> None:
        """Destroy the groups, as a child's exit would. In rank 0, wait for the other ranks, as the parent does."""
        self._wait_for_all("left", group_timeout)
        if group_timeout is not None:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
        self._wait_for_all("ended", timeout if self._context.rank == 0 else None)

    def _run_child(self, case: Any, file_name: str, changes: dict[str, str | None]) -> None:
        """Run the function that torch runs in each child process; raise a skip or an error for its exit status."""
        __tracebackhide__ = True
        options = {"fake_pg": True} if getattr(case, "fake_pg", False) else {}
        before = dict(os.environ)
        wanted = {**self._original, _NAMES_THE_TEST: before.get(_NAMES_THE_TEST), **changes}
        _set_environment({name: value for name, value in wanted.items() if value is not None})
        try:
            type(case)._run(self._context.rank, case._current_test_name(), file_name, None, **options)
        except SystemExit as end:
            for skip in self._harness.TEST_SKIPS.values():
                if end.code == skip.exit_code:
                    raise unittest.SkipTest(skip.message) from None
            if end.code not in (None, 0):
                raise RuntimeError(f"the rank called sys.exit({end.code!r})") from end
        finally:
            _set_environment(before)

    def _run_test(self, case: Any, test: str) -> None:
        """Run the test's method as torch's `run_test` does, without its exit codes and its thread for timeouts."""
        __tracebackhide__ = True
        if hasattr(self._harness, "common_utils"):  # torch 2.8 and older set no seed here.
            self._harness.common_utils.set_rng_seed()
        getattr(case, test)()

    def _wait_for_all(self, event: str, timeout: timedelta | None) -> None:
        """Announce that this rank has reached `event`; wait up to `timeout` until all have, or not at all if None."""
        keys = [self._key(f"{event} {rank}") for rank in range(self._context.spec.ranks)]
        with suppress(RuntimeError):  # torch's errors after the timeout, and if rank 0 has died.
            self._store.set(keys[self._context.rank], b"")
            if timeout is not None:
                self._store.wait(keys, timeout)

    @property
    def _store(self) -> Any:
        return self._context.signed_store

    def _key(self, name: str) -> str:
        return f"adopted {self._context.tests} {name}"


def _record_start(case: Any, process: Any) -> None:
    """Record the environment that the children would inherit, instead of starting them as `_start_processes` does."""
    case._accel_environment = dict(os.environ)
    case._accel_process = process


def _set_environment(wanted: dict[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)
