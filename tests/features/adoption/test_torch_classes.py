"""Tests of the three test classes of torch's harness: they run in ranks, with the verdicts that torch gives them.

The suites are in the style of torch's own files: ``test_c10d_common.py`` (`MultiProcessTestCase`),
``test_c10d_ops_nccl.py`` and ``test_device_mesh.py`` (`MultiProcContinuousTest`), ``test_functional_api.py``
(`MultiThreadedTestCase`).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.background_suite import BackgroundSuite, suite
from tests.run import CAUSES

__all__ = ["suite"]

pytest.importorskip("expecttest")  # torch.testing._internal imports it.

INI = """[pytest]
accel = sim:4
accel_adopt = torch
accel_preload = torch.testing._internal.common_distributed
"""
HEAD = """
import os
import signal
import sys
import tempfile
import time
import unittest

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_distributed import (
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    TEST_SKIPS,
    TIMEOUT_OVERRIDE,
    requires_gloo,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_utils import find_free_port


TIMEOUT_OVERRIDE |= dict.fromkeys(("test_processes_hang", "test_continuous_hang", "test_continuous_kill"), 8)


class FailingSetUpClass:
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        raise ValueError("no service")


class Processes(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def make_group(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)


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


class Threads(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

"""
PROCESSES = """
class TestProcesses(Processes):
    @requires_gloo()
    def test_processes_pass(self):
        self.make_group()
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


class TestConnecting(Processes):
    def connect(self):
        "Make the group, to which rank 0 connects for a second longer than rank 1."
        self.make_group()
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
PARENT = """
class TestParent(MultiProcessTestCase):
    @property
    def world_size(self):
        return int(os.environ.get("SIZE", "3"))

    def setUp(self):
        super().setUp()
        assert self.rank == self.MAIN_PROCESS_RANK and self.is_master is False
        self.of_the_parent = True
        os.environ["FOLDER"] = tempfile.mkdtemp()  # Another one in each process: the children have their one parent's.
        self._spawn_processes()
        os.environ["LATER"] = "1"

    def tearDown(self):
        assert self.of_the_parent
        os.rmdir(os.environ["FOLDER"])
        super().tearDown()

    def test_child(self):
        assert not hasattr(self, "of_the_parent") and not hasattr(self, "processes")
        assert "LATER" not in os.environ
        assert self.world_size == 3 and 0 <= self.rank < 3
        store = dist.FileStore(self.file_name, 3)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=3)
        told = [None] * 3
        dist.all_gather_object(told, os.environ["FOLDER"])
        assert len(set(told)) == 1 and os.path.isdir(told[0])
        assert torch.initial_seed() == 1234


class TestUnstarted(MultiProcessTestCase):
    world_size = 2

    def test_nothing_runs(self):
        pass
"""
ENDS = """
class TestEnds(Processes):
    def test_exit_3(self):
        if self.rank == 1:
            sys.exit(3)

    def test_skip_on_1(self):
        if self.rank == 1:
            raise unittest.SkipTest("not here")

    def test_ends_quietly(self):
        if self.rank == 1:
            os._exit(0)

    def test_after_all(self):
        self.make_group()
        dist.barrier()


class TestDies(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self.special_return_code_checks = {self.test_abort.__wrapped__: -signal.SIGABRT}
        self._spawn_processes()

    def test_abort(self):
        os.abort()
"""
WARM = """
seen = []


class TestWarm(Processes):
    def once(self):
        assert not dist.is_initialized()
        self.make_group()
        told = [None, None]
        dist.all_gather_object(told, (self.file_name, os.getpid()))
        (file, one), (same, other) = told
        assert file == same and one != other
        dist.new_group([0, 1])
        dist.barrier()  # One that ends its groups while the other still makes them breaks the other's.
        seen.append(told)
        assert len({file for (file, _), _ in seen}) == len(seen)

    def test_1_leaves_its_groups(self):
        self.once()

    def test_2_leaves_its_environment(self):
        self.once()
        dist.destroy_process_group()
        os.environ["RANK"] = "7"
        os.environ["OURS"] = "1"

    def test_3_is_in_the_same_processes(self):
        self.once()
        assert "OURS" not in os.environ and "RANK" not in os.environ
        assert len(seen) == 3
        assert len({(one, other) for (_, one), (_, other) in seen}) == 1

    def test_4_knows_its_rank_alone(self):
        with pytest.raises(ValueError, match="environment variable MASTER_ADDR expected, but not set"):
            dist.init_process_group("gloo", rank=self.rank, world_size=2)


class TestAddress(DistributedTestBase):
    world_size = 2

    def setUp(self):
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(find_free_port())
        super().setUp()

    def test_in_the_environment(self):
        dist.init_process_group("gloo", rank=self.rank, world_size=2)
        dist.barrier()


@pytest.mark.distributed(2, init=False)
def test_other(rank):
    assert len(seen) == 3 and not dist.is_initialized()
    assert os.environ["RANK"] == str(rank)


@pytest.mark.distributed(3)
class TestMarked(Processes):
    def test_size(self):
        pass
"""
WRITE_FILE_NAMES = """
@pytest.fixture(autouse=True)
def write_file_name(request):
    yield
    if request.instance is not None:
        with open("files", "a") as file:
            print(request.instance.file_name, file=file)
"""
"""Each adopted test writes the name of its file to ``files``."""
UNKNOWN_SIZE = """
class TestUnknown(MultiProcessTestCase):
    @property
    def world_size(self):
        return int(os.environ["NO_SUCH_VARIABLE"])

    def test_alone(self):
        pass
"""
RPC = """
import torch.distributed.rpc as rpc
from torch.testing._internal.dist_utils import dist_init, worker_name
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

pytestmark = pytest.mark.filterwarnings("ignore:You are using a Backend")
begun = []


class TestRpc(TensorPipeRpcAgentTestFixture, Processes):
    world_size = 2

    @dist_init
    def refer(self):
        assert not begun
        begun.append(self.rank)
        reference = rpc.remote(worker_name(1 - self.rank), torch.add, args=(torch.zeros(2), 1))
        self.assertEqual(reference.to_here().sum(), 2)

    test_references = test_references_once_more = refer
"""
LEASED = """
def devices():
    return len(os.environ["SIM_VISIBLE_DEVICES"].split(","))


class TestLeased(Continuous):
    def test_1_sum(self):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2 and devices() == 2

    def test_2_fails(self):
        assert self.rank == 0


class TestLeasedThreads(Threads):
    def test_3_leased(self):
        assert devices() == 2
"""
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
    suite.write("pytest.ini", f"{INI}accel_timeout = 6\n")
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


def test_torch_starts_the_processes_of_a_class_with_a_mark_for_devices(suite: BackgroundSuite) -> None:
    """With `spawn`, too, its processes are started once for the class, and share its devices."""
    write_classes(suite, leased=LEASED)
    suite.write(
        "pytest.ini", INI.replace("= torch\n", "= torch spawn\n") + "accel_rules = test_leased.py: devices(2)\n"
    )
    suite.run().expect({"test_1_sum": "PASSED", "test_2_fails": "FAILED", "test_3_leased": "PASSED"})


@pytest.mark.long
def test_each_adopted_test_has_new_groups_and_files(suite: BackgroundSuite) -> None:
    """It runs in the same ranks as the test before unless it uses RPC."""
    warm, rpc = WRITE_FILE_NAMES + WARM, WRITE_FILE_NAMES + RPC
    write_classes(suite, parent=PARENT, ends=ENDS, warm=warm, rpc=rpc, not_adopted=UNKNOWN_SIZE)
    suite.write("pytest.ini", f"{INI}filterwarnings = error\n")
    run = suite.run("-rs")
    failed = {
        "TestEnds.test_exit_3": r"the rank called sys\.exit\(3\)",
        "TestEnds.test_skip_on_1": "the ranks disagree in the call phase: rank 1 skipped",
        "TestEnds.test_ends_quietly": "rank 1 exited with status 0",
        "TestMarked.test_size": "the test case's world_size is 2, its world has 3",
    }
    passed = re.findall(r"def (test_[1-4]\w+)", WARM)
    passed += ["test_child", "test_after_all", "test_abort", "test_in_the_environment", "test_other"]
    passed += ["test_alone", "test_references", "test_references_once_more"]
    run.expect(
        {
            **dict.fromkeys((name.partition(".")[2] for name in failed), "FAILED"),
            **dict.fromkeys(passed, "PASSED"),
            "test_nothing_runs": "SKIPPED",
        }
    )
    for name, pattern in failed.items():
        assert re.search(pattern, run.failure(name))
    assert "rank 0: passed" in run.failure("TestEnds.test_exit_3"), "rank 0 need not wait for a failed rank"
    assert "its setUp has started no processes" in run.text
    assert "test_not_adopted.py::TestUnknown is not adopted: reading its world_size raised KeyError: " in run.text
    files = set((suite.path / "files").read_text().splitlines())
    assert len(files) == 2 * (5 + 2) + 3, "one for each rank and each test of a class in test_warm.py and test_rpc.py"
    assert not any(Path(file).exists() for file in files)  # Without adoption, torch would leave these files.
