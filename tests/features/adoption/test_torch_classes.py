"""Tests of the three test classes of torch's harness: adopted and not adopted, they have the same verdicts.

The suites are in the style of torch's own files: ``test_c10d_common.py`` (`MultiProcessTestCase`),
``test_c10d_ops_nccl.py`` and ``test_device_mesh.py`` (`MultiProcContinuousTest`), ``test_functional_api.py``
(`MultiThreadedTestCase`).
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
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    TEST_SKIPS,
    TIMEOUT_OVERRIDE,
    requires_gloo,
    skip_if_lt_x_gpu,
)


TIMEOUT_OVERRIDE |= dict.fromkeys(("test_processes_hang", "test_continuous_hang", "test_continuous_kill"), 8)


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
CONTINUOUS = """
class Continuous(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    @classmethod
    def opts(cls):
        assert cls.timeout.total_seconds() == 120
        return None


class TestContinuous(Continuous):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        os.environ["OF_CLASS"] = "1"
        with open("set up", "a") as file:
            file.write("once ")

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        os.environ.pop("OF_CLASS")
        with open("torn down", "a") as file:
            file.write("once ")

    def setUp(self):
        super().setUp()
        self.of_parent = True

    @property
    def device(self):
        return torch.device(self.device_type(), self.rank)

    @requires_gloo()
    def test_continuous_1_pass(self):
        assert not hasattr(self, "of_parent")
        assert os.environ["OF_CLASS"] == "1" and os.environ["LOCAL_RANK"] == str(self.rank)
        assert torch.initial_seed() == 1234
        total = torch.ones(1)
        dist.all_reduce(total, group=self.pg)
        self.assertEqual(total.item(), self.world_size)
        os.environ["OF_WORKER"] = "1"
        type(self).first = os.getpid(), dist.group.WORLD

    @skip_if_lt_x_gpu(8)
    def test_continuous_2_skip_by_decorator(self):
        pass

    @unittest.skipIf(True, "never")
    def test_continuous_3_skip_of_unittest(self):
        pass

    def test_continuous_4_same_ranks_and_group(self):
        assert (os.getpid(), dist.group.WORLD) == self.first
        assert os.environ["OF_WORKER"] == "1" and "MASTER_ADDR" not in os.environ

    def test_continuous_5_mesh(self):
        mesh = init_device_mesh("cpu", (self.world_size,))
        told = [None] * self.world_size
        dist.all_gather_object(told, self.rank, group=mesh.get_group())
        self.assertEqual(told, [0, 1])
        dist.new_group([0, 1])

    def test_continuous_6_fail(self):
        self.assertEqual(self.rank, 0)


class TestProperty(Continuous):
    device_type = "cpu"

    @property
    def world_size(self):
        return 3

    def test_continuous_with_properties(self):
        gathered = torch.empty(3, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, torch.tensor([self.rank]))
        self.assertEqual(gathered.tolist(), [0, 1, 2])
        self.assertEqual(self.world_size, 3)


class TestExit(Continuous):
    def test_continuous_exit(self):
        sys.exit(0)


class TestKill(Continuous):
    def test_continuous_kill(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class TestHang(Continuous):
    def test_continuous_hang(self):
        if self.rank == 1:
            time.sleep(12)


class TestSkippingGroup(Continuous):
    @classmethod
    def _init_pg(cls, rank, world_size, file):
        sys.exit(TEST_SKIPS["backend_unavailable"].exit_code)

    def test_continuous_without_group(self):
        pass

    test_continuous_without_group_again = test_continuous_without_group


class TestDifferent(Continuous):
    def test_different_1_skip(self):
        raise unittest.SkipTest("not here")

    def test_different_2_fail(self):
        self.assertEqual(self.rank, 0)

    def test_different_3_after_the_failure(self):
        dist.barrier()


class TestContinuousWithoutClass(FailingSetUpClass, Continuous):
    def test_continuous_of_no_class(self):
        pass
"""
THREADS = """
class Threads(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()


class TestThreads(Threads):
    def test_threads_pass(self):
        total = functional.all_reduce(torch.ones(1), "sum", list(range(4)))
        self.assertEqual(total.item(), 4)
        assert dist.get_rank() == self.rank and "RANK" not in os.environ

    def test_threads_fail(self):
        self.assertNotEqual(self.rank, 1)

    def test_threads_fail_before_others(self):
        assert self.rank != 1
        dist.barrier()

    @skip_if_lt_x_gpu(8)
    def test_threads_skip_by_decorator(self):
        pass

    def test_threads_skip(self):
        raise unittest.SkipTest("not here")

    def test_threads_exit(self):
        if self.rank == 1:
            sys.exit(3)


class TestEndingThreads(Threads):
    def test_threads_hang(self):
        if self.rank == 1:
            time.sleep(12)

    def test_threads_kill(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class TestThreadsWithoutClass(FailingSetUpClass, Threads):
    def test_threads_of_no_class(self):
        pass
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
    "test_continuous_1_pass": "PASSED",
    "test_continuous_2_skip_by_decorator": "SKIPPED",
    "test_continuous_3_skip_of_unittest": "SKIPPED",
    "test_continuous_4_same_ranks_and_group": "PASSED",
    "test_continuous_5_mesh": "PASSED",
    "test_continuous_6_fail": "FAILED",
    "test_continuous_with_properties": "PASSED",
    "test_continuous_exit": "FAILED",
    "test_continuous_kill": "FAILED",
    "test_continuous_hang": "FAILED",
    "test_continuous_without_group": "SKIPPED",
    "test_continuous_without_group_again": "SKIPPED",
    "test_continuous_of_no_class": "ERROR",
    "test_threads_pass": "PASSED",
    "test_threads_fail": "FAILED",
    "test_threads_fail_before_others": "FAILED",
    "test_threads_skip_by_decorator": "SKIPPED",
    "test_threads_skip": "SKIPPED",
    "test_threads_exit": "PASSED",  # torch looks only for its own exit codes.
    "test_threads_hang": "FAILED",
    "test_threads_kill": "FAILED",
    "test_threads_of_no_class": "ERROR",
}
"""The verdicts that torch gives to the tests, and that their adoption must not change."""
DIFFERENT = {
    "test_different_1_skip": ("FAILED", "SKIPPED"),
    "test_different_2_fail": ("SKIPPED", "FAILED"),
    "test_different_3_after_the_failure": ("SKIPPED", "PASSED"),
}
"""The verdicts of tests that the documentation lists as different: without and with adoption."""
NOT_ADOPTED = {
    "continuous, without hangs": ("test_continuous.py", "not TestKill and not TestHang"),
    "continuous, killed": ("test_continuous.py", "TestKill"),
    "continuous, hangs": ("test_continuous.py", "TestHang"),
    "processes": ("test_processes.py", "not TestEnding"),
    "processes, killed or hangs": ("test_processes.py", "TestEnding"),
    "threads": ("test_threads.py", "test"),
}
"""The sessions that run the suites without adoption, in parts that take half a minute each: file and ``-k``."""


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
    write_classes(suite, processes=PROCESSES, continuous=CONTINUOUS, threads=THREADS, connecting=CONNECTING)
    # torch's own suite sets WORLD_SIZE for its files.
    run = suite.start("-rs", *options, CAUSES, environment={"WORLD_SIZE": "7"}).finish()
    run.expect(
        {
            **EXPECTED,
            **{test: adopted for test, (_, adopted) in DIFFERENT.items()},
            **dict.fromkeys(("test_connecting_skip_code", "test_connecting_skip"), "SKIPPED"),
            **dict.fromkeys(("test_connecting_exit_0", "test_variables_of_the_session"), "PASSED"),
            "test_continuous_6_fail": "FAILED failed: AssertionError; rank 1",
            "test_continuous_exit": "FAILED failed: RuntimeError; ranks 0-1",
            "test_continuous_kill": "FAILED died: SIGKILL; rank 1",
            "test_continuous_hang": "FAILED hung: phase timeout; rank 1",
        }
    )
    assert "Skipped due to odd world size." in run.text
    assert "LeftoverWarning: ranks 0-1 did not destroy" not in run.text
    if "-n" not in options:
        assert [(suite.path / name).read_text() for name in ("set up", "torn down")] == ["once " * 2] * 2


@pytest.mark.long
@pytest.mark.parametrize(("file", "selected"), NOT_ADOPTED.values(), ids=NOT_ADOPTED)
def test_torch_gives_these_verdicts(suite: BackgroundSuite, file: str, selected: str) -> None:
    write_classes(suite, processes=PROCESSES, continuous=CONTINUOUS, threads=THREADS)
    # A killed thread ends its process, which is then a worker.
    options = ("-n", "1") if file == "test_threads.py" else ()
    environment = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "8"} if file == "test_threads.py" else {}
    session = suite.start(file, "-k", selected, "-o", "accel_adopt=", *options, environment=environment)
    outcomes = session.finish().outcomes()
    expected = EXPECTED | {test: torch for test, (torch, _) in DIFFERENT.items()}
    assert outcomes == {test: expected[test] for test in outcomes}
