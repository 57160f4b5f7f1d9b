"""Execution of test classes of torch's harness in ranks that are already running, instead of new processes.

In torch (``torch/testing/_internal/common_distributed.py`` of torch 2.13), the parent process of a
`MultiProcessTestCase` runs ``setUp``, which starts a process for each rank, joins them and checks their exit codes, and
runs ``tearDown``. Child processes create the test case again and run its method alone. Here, each rank runs both parts:
the child's where the parent would join, with the file name and the environment that rank 0 would have given to its
children.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from pytest_accel.features.adoption.suite_adoption import HARNESS, is_of_harness
from pytest_accel.rank import group_state, process_group
from pytest_accel.rank.process_group import Gathering

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext


class HarnessInRank:
    """Pytest plugin that runs test cases of torch in this rank which would otherwise start a process for each rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._identity = process_group.identity(context.spec, context.rank, port=0).keys()
        """Names of the variables that identify the rank. torch passes the rank to the test case only."""
        self._original, self._exchange = dict(os.environ), Gathering(context, "adopted")
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
        if not is_of_harness(item):
            return (yield)
        if self._harness is None:
            self._replace_functions()
        with mock.patch.dict(os.environ):
            for name in self._identity:
                os.environ.pop(name, None)
            # torch's own suite sets WORLD_SIZE for all of its files.
            os.environ.update({name: text for name, text in self._context.inherited.items() if name in self._identity})
            return (yield)

    def _run(self, case: Any, function: Any) -> None:
        """Run the child's part in this rank, where torch's parent process would join its children."""
        __tracebackhide__ = True
        context, exchange = self._context, self._exchange
        case.addCleanup(Path(case.file_name).unlink, missing_ok=True)  # torch does not remove it.
        environment, process = vars(case).get("_accel_start", (None, None))
        if process is None:
            raise unittest.SkipTest("its setUp has started no processes")
        if function in case.skip_return_code_checks or function in case.special_return_code_checks:
            if context.rank == 0:  # Its processes are to die: start new ones, as torch does.
                self._start_processes(case, process)
                self._join_processes(case, function)
            return
        size, ranks = int(case.world_size), context.spec.ranks
        assert size == ranks, f"the test case's world_size is {size}, its world has {ranks}"
        # Not the whole environment, which may have secrets: others can read the store.
        changes = {name: value for name, value in environment.items() if self._original.get(name) != value}
        file_name, changes = json.loads(exchange(json.dumps([case.file_name, changes]).encode())[0])
        group_state.start(context)
        try:
            with mock.patch.dict(os.environ, {**environment, **changes}, clear=True):
                self._run_child(case, file_name)
        except unittest.SkipTest:
            self._leave()
            raise
        except BaseException:
            exchange.put(b"")  # A rank that fails does not wait, and leaves its groups as they are.
            raise
        self._leave()

    def _run_child(self, case: Any, file_name: str) -> None:
        """Call torch's function of a child process; raise a skip or an error for its exit status."""
        __tracebackhide__ = True
        options = {"fake_pg": True} if getattr(case, "fake_pg", False) else {}
        try:
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

    def _leave(self) -> None:
        """Wait for the other ranks and destroy the groups, as the exit of all children would.

        torch's functions that create a group return as soon as this rank is connected; if it closed the connections at
        once, a slower rank would fail.
        """
        import torch.distributed as dist

        __tracebackhide__ = True
        self._exchange(b"")
        if dist.is_initialized():
            dist.destroy_process_group()
