"""Execution of test classes of torch's harness in ranks that are already running, instead of new processes.

In torch (``torch/testing/_internal/common_distributed.py`` of torch 2.13), a parent process runs ``setUp`` and
``tearDown``, and child processes create the test case again and run its method alone. Here, each rank runs both parts,
the child's with the file name and the environment that rank 0 would have given to its children.

- ``MultiProcessTestCase`` starts a process for each rank in each ``setUp``. The parent then joins them and checks their
  exit codes. The rank runs the child's part where the parent would join.
- ``MultiProcContinuousTest`` starts them once for the class, with a process group, and sends them tests through queues.
  The rank has one object in place of its process and its queues.
- The threads of ``MultiThreadedTestCase`` are started by torch, in one rank.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from pytest_accel.features.adoption.suite_adoption import CONTINUOUS, HARNESS, PROCESSES, UNSET, harness_of
from pytest_accel.rank import group_state, process_group
from pytest_accel.rank.process_group import Gathering

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext


class HarnessInRank:
    """Pytest plugin that runs test cases of torch in this rank which would otherwise start a process for each rank."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self._identity = process_group.identity(context.spec, context.rank, port=0).keys()
        """Names of the variables that identify the rank. torch passes the rank to the test case only."""
        self.original, self.exchange = dict(os.environ), Gathering(context, "adopted")
        self._harness: Any = None

    def _replace_functions(self) -> None:
        self._harness = sys.modules[HARNESS]
        case = self._harness.MultiProcessTestCase
        self._start_processes, self._join_processes = case._start_processes, case._join_processes
        # The environment that the children would inherit, in place of the start of the children.
        case._start_processes = lambda case, process: setattr(case, "_accel_start", (dict(os.environ), process))
        case._join_processes = lambda case, function: self._run(case, function)
        case.run_test = lambda case, test_name, parent_pipe: self._run_test(case, test_name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Generator[None, None, None]:
        """Give the variables that identify the rank the session's values, as in torch's parent process.

        Restore the environment afterwards: test cases of torch set variables in `setUp` and never unset them.
        """
        __tracebackhide__ = True
        if (base := harness_of(item)) is None:
            return (yield)
        if base == PROCESSES and self._harness is None:
            self._replace_functions()
        if base == CONTINUOUS and self.context.spec.key.grouped:
            item.cls._spawn_processes = partial(self._start_class, item)
            if item.cls.world_size == UNSET:
                item.cls.world_size = self.context.spec.ranks
        with mock.patch.dict(os.environ):
            for name in self._identity:
                os.environ.pop(name, None)
            # torch's own suite sets WORLD_SIZE for all of its files.
            os.environ.update({name: text for name, text in self.context.inherited.items() if name in self._identity})
            return (yield)

    def _run(self, case: Any, function: Any) -> None:
        """Run the child's part in this rank, where torch's parent process would join its children."""
        __tracebackhide__ = True
        case.addCleanup(Path(case.file_name).unlink, missing_ok=True)  # torch does not remove it.
        environment, process = vars(case).get("_accel_start", (None, None))
        if process is None:
            raise unittest.SkipTest("its setUp has started no processes")
        if function in case.skip_return_code_checks or function in case.special_return_code_checks:
            if self.context.rank == 0:  # Its processes are to die: start new ones, as torch does.
                self._start_processes(case, process)
                self._join_processes(case, function)
            return
        child = _Child(self, case.world_size, case.file_name, environment)
        options = {"fake_pg": True} if getattr(case, "fake_pg", False) else {}
        try:
            child.run(type(case)._run, self.context.rank, case._current_test_name(), child.file_name, None, **options)
        except BaseException as error:
            child.leave(waits=isinstance(error, unittest.SkipTest))
            raise
        child.leave()

    def _run_test(self, case: Any, test: str) -> None:
        """Run the test's method as torch's `run_test` does, without its exit codes and its thread for timeouts."""
        __tracebackhide__ = True
        if hasattr(self._harness, "common_utils"):  # torch 2.8 and older set no seed here.
            self._harness.common_utils.set_rng_seed()
        getattr(case, test)()

    def _start_class(self, item: Any, size: Any) -> None:
        """Begin the child's part for all tests of the class of `item`, where torch would start its processes."""
        __tracebackhide__ = True
        case, context, folder = item.cls, self.context, self.context.shared_directory
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        worker = _Worker(self, size, str(folder / "adopted"), dict(os.environ))
        worker.case, context.keeps_groups = case, True
        item.getparent(pytest.Class).addfinalizer(worker.leave)
        case.rank, case.processes, case.task_queues, case.completion_queues = context.rank, [worker], [worker], [worker]
        worker.run(case._init_pg, context.rank, size, worker.file_name)


class _Child:
    """The part of a test that torch runs in a child process, run in this rank."""

    passing: tuple[object, ...] = (None, 0)
    """The exit statuses of a test that has passed."""

    def __init__(self, harness: HarnessInRank, size: Any, file_name: str, environment: dict[str, str]) -> None:
        """Get rank 0's `file_name`, and from its `environment` what differs from the environment of its process."""
        __tracebackhide__ = True
        self._harness, ranks = harness, harness.context.spec.ranks
        assert int(size) == ranks, f"the test case's world_size is {size}, its world has {ranks}"
        # Not the whole environment, which may have secrets: others can read the store.
        changes = {name: value for name, value in environment.items() if harness.original.get(name) != value}
        self.file_name, changes = json.loads(harness.exchange(json.dumps([file_name, changes]).encode())[0])
        self._environment = {**environment, **changes}
        group_state.start(harness.context)

    def run(self, function: Callable[..., object], *args: object, **options: object) -> None:
        """Call a function of torch's child process; raise a skip or an error for its exit status."""
        __tracebackhide__ = True
        try:
            with mock.patch.dict(os.environ, self._environment, clear=True):
                try:
                    function(*args, **options)
                finally:
                    self._environment = dict(os.environ)
        except SystemExit as end:
            skips = {skip.exit_code: skip.message for skip in sys.modules[HARNESS].TEST_SKIPS.values()}
            if end.code in skips:
                raise unittest.SkipTest(skips[end.code]) from None
            if end.code not in self.passing:
                raise RuntimeError(f"the rank called sys.exit({end.code!r})") from end

    def leave(self, *, waits: bool = True) -> None:
        """Wait for the other ranks and destroy the groups, as the exit of all children would.

        torch's functions that create a group return as soon as this rank is connected; if it closed the connections at
        once, a slower rank would fail. A rank that fails does not wait, and leaves its groups as they are.
        """
        import torch.distributed as dist

        __tracebackhide__ = True
        if not waits:
            self._harness.exchange.put(b"")
            return
        self._harness.exchange(b"")
        if dist.is_initialized():
            dist.destroy_process_group()


class _Worker(_Child):
    """This rank, in place of a process of a `MultiProcContinuousTest` and of its queues for tests and for results.

    It is used from the first test of a class on, until the class is torn down.
    """

    passing = ()
    case: Any  # The class.

    def put(self, test: str) -> None:
        """Take the id of a test."""
        self._test = test

    def get(self, timeout: float | None = None) -> str:
        """Run the test, and return its id as the result."""
        __tracebackhide__ = True
        self.run(self.case._run_test_given_id, self._test)
        return self._test

    def leave(self, *, waits: bool = True) -> None:
        """End the class; torch's `tearDownClass` finds no processes afterwards."""
        self.case._processes_spawned = self._harness.context.keeps_groups = False
        super().leave(waits=waits)
