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
from unittest import mock

import pytest

from pytest_accel.features.adoption.suite_adoption import harness_of
from pytest_accel.rank import flight_recorder, process_group, rank_environment

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

_LEAVE_TIMEOUT = timedelta(seconds=5)
"""Time for which a rank that has ended the test keeps its groups for others that may still be connecting to it.

torch's functions that create a group return as soon as this rank is connected; if it closed the connections at once, a
slower rank would fail. The time is short, because in some tests a rank exits and never connects.
"""


class HarnessInRank:
    """Pytest plugin that runs test cases of torch in this rank which would otherwise start a process for each rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._identity = rank_environment.identity(context.spec, context.rank, port=0).keys()
        """Names of the variables that identify the rank. torch passes the rank to the test case only."""
        self._original = dict(os.environ)
        self._harness: Any = None

    def _replace_functions(self, harness: Any) -> None:
        self._harness, case = harness, harness.MultiProcessTestCase
        self._start_processes, self._join_processes = case._start_processes, case._join_processes
        # The environment that the children would inherit, in place of the start of the children.
        case._start_processes = lambda case, process: setattr(case, "_accel_start", (dict(os.environ), process))
        case._join_processes = lambda case, function: self._join(case, function)
        case.run_test = lambda case, test_name, parent_pipe: self._run_test(case, test_name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Unset the variables that identify the rank, as in torch's parent process; restore the environment afterwards.

        Test cases of torch set variables in their `setUp` and never unset them.
        """
        __tracebackhide__ = True
        if (harness := harness_of(item)) is None:
            return (yield)
        if self._harness is None:
            self._replace_functions(harness)
        with mock.patch.dict(os.environ):
            for name in self._identity:
                os.environ.pop(name, None)
            return (yield)

    def _join(self, case: Any, function: Any) -> None:
        __tracebackhide__ = True
        try:
            self._run(case, function)
        finally:
            Path(case.file_name).unlink(missing_ok=True)  # torch does not remove it.

    def _run(self, case: Any, function: Any) -> None:
        """Run the child's part in this rank, where torch's parent process would join its children."""
        __tracebackhide__ = True
        if (start := vars(case).get("_accel_start")) is None:
            raise unittest.SkipTest("its setUp has started no processes")
        environment, process = start
        context, key = self._context, f"adopted {self._context.tests} start"
        store: Any = context.signed_store
        if function in case.skip_return_code_checks or function in case.special_return_code_checks:
            if context.rank == 0:  # Its processes are to die: start new ones, as torch does.
                self._start_processes(case, process)
                self._join_processes(case, function)
            return
        size, ranks = int(case.world_size), context.spec.ranks
        assert size == ranks, f"the test case's world_size is {size}, its world has {ranks}"
        if context.rank == 0:  # Not the whole environment, which may have secrets: others can read the store.
            changes = {name: value for name, value in environment.items() if self._original.get(name) != value}
            store.set(key, json.dumps([case.file_name, changes]).encode())
        file_name, changes = json.loads(store.get(key))
        flight_recorder.start(context)
        try:
            self._run_child(case, file_name, {**environment, **changes})
        except BaseException as error:
            self._leave(waits=isinstance(error, unittest.SkipTest))
            raise
        self._leave(waits=True)

    def _leave(self, *, waits: bool) -> None:
        """Destroy the groups, as a child's exit would. In rank 0, wait for the other ranks, as the parent does.

        A rank that fails does not wait, and leaves its groups as they are; the others do not wait for it.
        """
        import torch.distributed as dist

        context = self._context
        store: Any = context.signed_store
        keys = [f"adopted {context.tests} left {rank}" for rank in range(context.spec.ranks)]
        with suppress(RuntimeError):  # torch's errors after the timeout, and if rank 0 has died.
            store.set(keys[context.rank], b"")
            if waits:
                store.wait(keys, _LEAVE_TIMEOUT)
        if waits and dist.is_initialized():
            dist.destroy_process_group()
        if waits and context.rank == 0:
            store.wait(keys, process_group.GROUP_TIMEOUT)

    def _run_child(self, case: Any, file_name: str, environment: dict[str, str]) -> None:
        """Run the function that torch runs in each child process; raise a skip or an error for its exit status."""
        __tracebackhide__ = True
        options = {"fake_pg": True} if getattr(case, "fake_pg", False) else {}
        try:
            with mock.patch.dict(os.environ, environment, clear=True):
                type(case)._run(self._context.rank, case._current_test_name(), file_name, None, **options)
        except SystemExit as end:
            skips = {skip.exit_code: skip.message for skip in self._harness.TEST_SKIPS.values()}
            if end.code in skips:
                raise unittest.SkipTest(skips[end.code]) from None
            if end.code not in (None, 0):
                raise RuntimeError(f"the rank called sys.exit({end.code!r})") from end

    def _run_test(self, case: Any, test: str) -> None:
        """Run the test's method as torch's `run_test` does, without its exit codes and its thread for timeouts."""
        __tracebackhide__ = True
        if hasattr(self._harness, "common_utils"):  # torch 2.8 and older set no seed here.
            self._harness.common_utils.set_rng_seed()
        getattr(case, test)()
