"""Tests of adoption: multi-process test cases of torch's test harness run in the plugin's ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.background_suite import BackgroundSuite, suite

__all__ = ["suite"]

pytest.importorskip("expecttest")  # torch.testing._internal imports it.

HEAD = """
import os
import signal
import sys
import tempfile
import unittest

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import (
    DistributedTestBase,
    MultiProcessTestCase,
    TEST_SKIPS,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_utils import find_free_port


class Case(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def make_group(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

"""

INI = """[pytest]
accel = sim:4
filterwarnings = error
accel_adopt = torch
# Else each new rank would import it for seconds.
accel_preload = torch.testing._internal.common_distributed
"""
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
class TestEnds(Case):
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


class TestWarm(Case):
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
class TestMarked(Case):
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
NOT_ADOPTED = """
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


class TestRpc(TensorPipeRpcAgentTestFixture, Case):
    world_size = 2

    @dist_init
    def refer(self):
        assert not begun
        begun.append(self.rank)
        reference = rpc.remote(worker_name(1 - self.rank), torch.add, args=(torch.zeros(2), 1))
        self.assertEqual(reference.to_here().sum(), 2)

    test_references = test_references_once_more = refer
"""


@pytest.mark.long
def test_adopted_tests_have_the_verdicts_that_torch_gives_them(suite: BackgroundSuite) -> None:
    """Each test has new groups and files, in the same ranks as the test before unless it uses RPC."""
    suite.write("pytest.ini", INI)
    for name, tests in {
        "test_parent": PARENT,
        "test_ends": ENDS,
        "test_warm": WRITE_FILE_NAMES + WARM,
        "test_rpc": WRITE_FILE_NAMES + RPC,
        "test_not_adopted": NOT_ADOPTED,
    }.items():
        (suite.path / f"{name}.py").write_text(HEAD + tests)

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
