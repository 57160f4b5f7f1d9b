"""Tests of leaks: what a test leaves changed or running in its ranks is undone, and reported as configured."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_SETTINGS_TESTS = """
    import os

    import pytest
    import torch

    pytestmark = pytest.mark.distributed(2, device="cpu")
    STARTED = os.getpid(), os.getcwd()


    def test_leaves_on_both(tmp_path_factory):
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.deterministic = True


    def test_leaves_on_one(rank):
        if rank == 1:
            os.chdir("/")


    def test_finds_all_put_back():
        assert (os.getpid(), os.getcwd()) == STARTED
        assert torch.get_default_dtype() == torch.float32
        assert torch.ones(1).device.type == "cpu"
        assert torch.get_deterministic_debug_mode() == 0
        assert not torch.backends.cudnn.benchmark
        assert not torch.backends.cudnn.deterministic
"""


@pytest.mark.parametrize("mode", ["warn", pytest.param("off", marks=pytest.mark.long)])
def test_leaks_are_undone_and_reported_as_configured(suite: Suite, mode: str) -> None:
    # By default a leak is a warning. Filters may hide it or make it an error.
    for action in ("default", "error", "ignore"):
        mark = f'pytest.mark.filterwarnings("{action}::pytest_accel.LeftoverWarning")'
        suite.write(f"test_{action}.py", _SETTINGS_TESTS + f"\n    pytestmark = [pytestmark, {mark}]\n")
    run = suite.run("--accel-leaks", mode)
    assert len(run.results) == 9
    failed = ("test_leaves_on_both", "test_leaves_on_one") if mode == "warn" else ()
    assert run.results == {test: ["PASSED"] for test in run.results} | {
        f"test_error.py::{name}": ["PASSED", "ERROR"] for name in failed
    }
    on_both = "ranks 0-1 left torch's default dtype changed from torch.float32 to torch.float64; it has been put back"
    assert (on_both in run.text) == (mode == "warn")
    assert ("rank 1 left the working directory changed from" in run.text) == (mode == "warn")
    shown = re.findall(r"test_(\w+)\.py:\d+: LeftoverWarning: ", run.text)
    assert shown.count("default") == (6 if mode == "warn" else 0)
    assert "ignore" not in shown


_PROCESS_TESTS = """
    import os
    import subprocess
    import sys
    import threading
    import time
    from concurrent.futures import ThreadPoolExecutor

    import psutil
    import pytest
    import torch
    import torch.distributed as dist

    pytestmark = pytest.mark.distributed(2, device="cpu")
    SEEN = {}


    def sleeper():
        return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


    @pytest.fixture(scope="module")
    def server():
        release = threading.Event()
        thread = threading.Thread(target=release.wait)
        thread.start()
        with sleeper() as child:
            yield child
            child.kill()
        release.set()


    def test_process(rank):
        SEEN["world"] = os.getpid()
        if rank == 1:
            SEEN["child"] = sleeper()


    def test_process_has_been_killed(rank):
        assert SEEN["world"] == os.getpid()
        if rank == 1:
            assert SEEN["child"].poll() is not None


    def test_uses_server(server):
        SEEN["server"] = server


    def test_process_that_ends_by_itself():
        child = subprocess.Popen([sys.executable, "-c", ""])


    def test_server_lives(server):
        assert SEEN["world"] == os.getpid()
        assert SEEN["server"] is server and server.poll() is None


    def test_executor():
        SEEN["executor"] = ThreadPoolExecutor()
        SEEN["executor"].submit(int).result()


    def test_executor_may_stay():
        assert SEEN["world"] == os.getpid()
        SEEN["executor"].shutdown()


    def test_thread():
        threading.Thread(target=threading.Event().wait, name="forgotten").start()


    def test_thread_is_gone():
        assert not SEEN
        assert "forgotten" not in {thread.name for thread in threading.enumerate()}
"""
_GROUP_TESTS = """
    import pytest
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    pytestmark = pytest.mark.distributed(2, device="cpu")
    SEEN = []


    def count():
        return len(dist.distributed_c10d._world.pg_map)


    def total(group=None):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        return tensor.item()


    def test_mesh():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
        assert total(mesh.get_group("data")) == 2
        SEEN.append("mesh")


    def test_after_mesh():
        assert (SEEN, count(), total()) == (["mesh"], 1, 2)


    def test_group():
        assert total(dist.new_group([0, 1])) == 2


    def test_new_group_is_a_new_one():
        assert (SEEN, count()) == (["mesh"], 1)
        assert total(dist.new_group([0, 1])) == 2
        for group in list(dist.distributed_c10d._world.pg_map)[1:]:
            dist.destroy_process_group(group)


    def test_group_named_after_its_ranks():
        assert total(dist.new_group([0, 1], use_local_synchronization=True)) == 2


    def test_another_world():
        assert (SEEN, count(), total()) == ([], 1, 2)
"""
_RPC_TESTS = """
    import os

    import pytest
    import torch
    import torch.distributed as dist
    import torch.distributed.rpc as rpc

    pytestmark = [
        pytest.mark.distributed(2, device="cpu"),
        pytest.mark.filterwarnings("ignore:You are using a Backend"),
    ]
    SEEN = []


    def init():
        rpc.init_rpc(f"worker{dist.get_rank()}", rank=dist.get_rank(), world_size=2)


    def use():
        other = f"worker{1 - dist.get_rank()}"
        reference = rpc.remote(other, torch.add, args=(torch.zeros(2), 1))
        assert rpc.rpc_sync(other, torch.add, args=(reference.to_here(), 1)).sum() == 4


    def test_leaves_it_running():
        init()


    @pytest.mark.parametrize("number", range(2))
    def test_has_references(number):
        init()
        use()
        rpc.shutdown()


    @pytest.fixture(scope="class")
    def agent():
        init()
        yield
        rpc.shutdown()


    class TestShares:
        @pytest.mark.parametrize("number", range(2))
        def test_one(self, agent, number):
            use()
            SEEN.append(number)


    def test_is_in_another_process():
        assert not SEEN
        init()
        use()
        rpc.shutdown()


    def test_needs_no_rpc():
        dist.barrier()
        SEEN.append("no rpc")


    def test_stays_in_its_process():
        assert SEEN == ["no rpc"]
"""
_WIDER_FIXTURE_TESTS = """
    import os
    import signal

    import pytest
    import torch

    pytestmark = pytest.mark.distributed(2, device="cpu")
    signal.alarm(1000)


    @pytest.fixture(scope="module", autouse=True)
    def doubles(tmp_path_factory):
        before = os.getcwd()
        torch.set_default_dtype(torch.float64)
        os.chdir(tmp_path_factory.mktemp("here"))
        yield
        torch.set_default_dtype(torch.float32)
        os.chdir(before)


    @pytest.mark.parametrize("number", range(2))
    def test_in_wider_fixture(number, monkeypatch):
        monkeypatch.chdir("/")
        assert torch.ones(1).dtype == torch.float64
        signal.alarm(0)  # As if the timer of the module had expired.
"""
"""A fixture of the module changes settings for its tests, and undoes this."""
_IMPORT_TESTS = """
    import pytest
    import torch

    torch.set_default_dtype(torch.float16)


    @pytest.mark.distributed(2, device="cpu")
    @pytest.mark.parametrize("number", range(2))
    def test_counts_in_halves(number):
        assert torch.ones(1).dtype == torch.float16
"""
"""The import changes a setting between two tests that change nothing."""
_LATE_FIXTURE_TESTS = """
    import pytest
    import torch

    pytestmark = pytest.mark.distributed(2, device="cpu")


    @pytest.fixture(scope="module", autouse=True)
    def sets_late():
        yield
        torch.set_default_dtype(torch.float64)


    def test_keeps_a_fixture():
        pass


    @pytest.mark.skip(reason="never")
    def test_never():
        pass
"""
"""The fixture is kept for a test that is never sent to the ranks, and torn down late."""
_OTHER_TESTS = """
    import pytest

    pytestmark = pytest.mark.distributed(2, device="cpu")


    def test_before_the_import():
        pass


    def test_before_the_late_fixture():
        pass


    def test_after_the_late_fixture():
        pass
"""


@pytest.mark.long
def test_leaks_and_nothing_else_fail_their_tests_on_request(suite: Suite) -> None:
    """Also what tests leave running is removed: processes, threads, process groups and RPC."""
    suite.write("test_leaves.py", _SETTINGS_TESTS)
    suite.write("test_starts.py", _PROCESS_TESTS)
    suite.write("test_groups.py", _GROUP_TESTS)
    suite.write("test_rpc.py", _RPC_TESTS)
    suite.write("test_wider.py", _WIDER_FIXTURE_TESTS)
    suite.write("test_import.py", _IMPORT_TESTS)
    suite.write("test_late.py", _LATE_FIXTURE_TESTS)
    suite.write("test_other.py", _OTHER_TESTS)
    files = [f"test_{name}.py" for name in ("leaves", "starts", "groups", "rpc", "wider")]
    before_import, before_late, after_late = (
        f"test_other.py::test_{name}"
        for name in ("before_the_import", "before_the_late_fixture", "after_the_late_fixture")
    )
    # test_other.py is imported before test_late.py runs, so that no import changes settings just before the last test.
    files += [before_import, "test_import.py", before_late, "test_late.py", after_late]
    run = suite.run("--accel-leaks", "fail", "-W", "ignore::ResourceWarning", *files)
    leaks = (
        "test_leaves_on_both",
        "test_leaves_on_one",
        "test_process",
        "test_thread",
        "test_group",
        "test_group_named_after_its_ranks",
        "test_leaves_it_running",
    )
    expected = dict.fromkeys(run.outcomes(), "PASSED") | dict.fromkeys(leaks, "PASSED ERROR")
    assert run.outcomes() == expected | {"test_never": "SKIPPED"}
    assert len(run.results) == len(run.outcomes()) == 3 + 9 + 6 + 8 + 2 + 2 + 2 + 3
    for text in (
        "ranks 0-1 left torch's default dtype changed from torch.float32 to torch.float64; it has been put back",
        "rank 1 left the working directory changed from",
        "rank 1 left process ",
        "-c import signal; signal.pause()); it has been killed",
        "ranks 0-1 left the thread 'forgotten' running; its processes have been replaced",
        "ranks 0-1 left process group ",
        "ranks 0-1 left torch.distributed.rpc running; its processes have been replaced",
    ):
        assert text in run.text
    assert "LeftoverWarning" not in run.text
    assert "outside of any test" not in run.text
