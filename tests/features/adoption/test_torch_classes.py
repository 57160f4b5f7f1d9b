"""Tests of torch's `MultiProcessTestCase`: adopted and not adopted, its tests have the same verdicts.

The suite is in the style of torch's own ``test_c10d_common.py``.
"""

from __future__ import annotations

import pytest

from tests.background_suite import BackgroundSuite, suite
from tests.run import CAUSES

__all__ = ["suite"]

pytest.importorskip("expecttest")  # torch.testing._internal imports it.

INI = """[pytest]
accel = sim:4
accel_adopt = torch
accel_preload = torch.testing._internal.common_distributed
accel_timeout = 6
"""
HEAD = """
import os
import signal
import sys
import time
import unittest

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    TEST_SKIPS,
    TIMEOUT_OVERRIDE,
    requires_gloo,
    skip_if_lt_x_gpu,
)


TIMEOUT_OVERRIDE["test_processes_hang"] = 8


class FailingSetUpClass:
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        raise ValueError("no service")

"""
PROCESSES = """
class Processes(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()


class TestProcesses(Processes):
    @requires_gloo()
    def test_processes_pass(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        total = torch.ones(1)
        dist.all_reduce(total)
        self.assertEqual(total.item(), 2)

    def test_processes_fail(self):
        self.assertEqual(self.rank, 0)

    @skip_if_lt_x_gpu(8)
    def test_processes_skip_by_decorator(self):
        pass

    def test_processes_skip(self):
        raise unittest.SkipTest("not here")

    @unittest.skipIf(True, "never")
    def test_processes_skip_of_unittest(self):
        pass

    def test_processes_exit(self):
        sys.exit(3)


class TestEndingProcesses(Processes):
    def test_processes_kill(self):
        if self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_processes_hang(self):
        if self.rank == 1:
            time.sleep(12)


class TestProcessesWithoutClass(FailingSetUpClass, Processes):
    def test_processes_of_no_class(self):
        pass
"""
OTHERS = """
class TestContinuous(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    @pytest.mark.devices(2)
    def test_continuous(self):
        assert os.environ["SIM_VISIBLE_DEVICES"] == "sim-0,sim-1"
        total = torch.ones(1)
        dist.all_reduce(total, group=self.pg)
        self.assertEqual(total.item(), 2)


class TestThreads(MultiThreadedTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_threads(self):
        total = functional.all_reduce(torch.ones(1), "sum", list(range(4)))
        self.assertEqual(total.item(), 4)
        assert "RANK" not in os.environ
"""
CONNECTING = """
from pathlib import Path


@pytest.fixture(autouse=True)
def note_end(request, rank):
    yield
    Path(f"{request.node.name}-{rank}").touch()


class TestConnecting(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def connect(self):
        "Make the group, to which rank 0 connects for a second longer than rank 1."
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        ended = Path(f"{self._testMethodName}-1")
        until = time.monotonic() + 1
        while self.rank == 0 and time.monotonic() < until:
            assert not ended.exists(), "rank 1 has closed its group"
            time.sleep(0.01)

    def test_connecting_skip_code(self):
        self.connect()
        sys.exit(TEST_SKIPS["odd_worldsize"].exit_code)

    def test_connecting_skip(self):
        self.connect()
        self.skipTest("not here")

    def test_connecting_exit_0(self):
        self.connect()
        sys.exit(0)

    def test_variables_of_the_session(self):
        assert os.environ["WORLD_SIZE"] == "7" and "RANK" not in os.environ
"""
"""Rank 1 ends each test while rank 0 still connects to it: as in torch, it must not have closed its group then."""
EXPECTED = {
    "test_processes_pass": "PASSED",
    "test_processes_fail": "FAILED",
    "test_processes_skip_by_decorator": "SKIPPED",
    "test_processes_skip": "SKIPPED",
    "test_processes_skip_of_unittest": "SKIPPED",
    "test_processes_exit": "FAILED",
    "test_processes_kill": "FAILED",
    "test_processes_hang": "FAILED",
    "test_processes_of_no_class": "ERROR",
}
"""The verdicts that torch gives to the tests, and that their adoption must not change."""


def write_classes(suite: BackgroundSuite, **files: str) -> None:
    suite.write("pytest.ini", INI)
    for name, tests in files.items():
        (suite.path / f"test_{name}.py").write_text(HEAD + tests)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--accel=sim:4",), id="sim"),
        pytest.param(("--accel=cpu:2", "-n", "2"), id="cpu", marks=pytest.mark.long),
    ],
)
def test_adopted_classes_have_the_verdicts_of_torch(suite: BackgroundSuite, options: tuple[str, ...]) -> None:
    write_classes(suite, processes=PROCESSES, connecting=CONNECTING)
    # torch's own suite sets WORLD_SIZE for its files.
    run = suite.start("-rs", *options, CAUSES, environment={"WORLD_SIZE": "7"}).finish()
    run.expect(
        {
            **EXPECTED,
            **dict.fromkeys(("test_connecting_skip_code", "test_connecting_skip"), "SKIPPED"),
            **dict.fromkeys(("test_connecting_exit_0", "test_variables_of_the_session"), "PASSED"),
        }
    )
    assert "Skipped due to odd world size." in run.text
    assert "LeftoverWarning: ranks 0-1 did not destroy" not in run.text


@pytest.mark.long
@pytest.mark.parametrize("selected", ["not TestEnding", "TestEnding"])  # Each takes half a minute.
def test_torch_gives_these_verdicts(suite: BackgroundSuite, selected: str) -> None:
    write_classes(suite, processes=PROCESSES)
    outcomes = suite.start("-k", selected, "-o", "accel_adopt=").finish().outcomes()
    assert outcomes == {test: EXPECTED[test] for test in outcomes}


@pytest.mark.long
def test_other_classes_of_torch_start_their_own_processes_and_threads(suite: BackgroundSuite) -> None:
    write_classes(suite, others=OTHERS)
    run = suite.start("-o", "accel_adopt=torch spawn", "-o", "accel_timeout=60").finish()
    run.expect({"test_continuous": "PASSED", "test_threads": "PASSED"})
