"""Tests of suites as people write them for a GPU: each test has its own verdict, and those after a fault are healthy.

The conftest of these suites initialises CUDA when it is imported. So the main process and each worker hold memory of
the card for the whole session. Other programs may use the card at the same time: no test asserts how much memory is
free, or takes more than 12 GiB.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_accel.fixtures import Accel
    from tests.background_suite import BackgroundSuite

pytestmark = pytest.mark.devices(kind="cuda")

TIMEOUT = 200.0
"""Seconds after which a session counts as hung; shorter than the timeout of a test."""

CONFTEST = """
    import torch

    CAPABILITY = torch.cuda.get_device_capability()
    torch.zeros(1, device="cuda")
    """

KERNELS = """
    import triton
    import triton.language as tl


    @triton.jit
    def double(source, target, count, BLOCK: tl.constexpr):
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        tl.store(target + place, 2 * tl.load(source + place, mask=inside), mask=inside)
    """

CHILDREN = """
    from pathlib import Path

    import torch


    def write_sum(index, path):
        Path(path).write_text(str(torch.ones(8, device="cuda").sum().item()))
    """

ORDINARY = """
    import shutil
    import sysconfig
    from pathlib import Path

    import pytest
    import torch

    import children
    from conftest import CAPABILITY

    pytestmark = pytest.mark.devices(1)
    needs_compiler = pytest.mark.skipif(
        shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
        reason="Triton needs a C compiler and Python's headers",
    )


    @pytest.fixture(scope="class")
    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 8)).to("cuda")


    class TestModel:
        def test_backward(self, model):
            model(torch.ones(64, 512, device="cuda")).sum().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())

        def test_step(self, model):
            before = model[0].weight.detach().clone()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            model(torch.ones(64, 512, device="cuda")).sum().backward()
            optimizer.step()
            assert not torch.equal(model[0].weight, before)


    @pytest.mark.skipif(CAPABILITY < (99, 0), reason="needs compute capability 99.0")
    def test_on_future_cards():
        raise AssertionError


    def test_libraries():
        image = torch.ones(1, 3, 64, 64, device="cuda")
        kernel = torch.ones(8, 3, 3, 3, device="cuda")
        assert torch.nn.functional.conv2d(image, kernel).shape == (1, 8, 62, 62)
        assert torch.fft.fft2(image).shape == image.shape
        assert torch.linalg.solve(torch.eye(8, device="cuda"), torch.ones(8, 1, device="cuda")).sum().item() == 8
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert (image[0, 0] @ image[0, 0]).sum().item() == 64**3


    def test_graph():
        values = torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            values += 1
        graph.replay()
        assert values.tolist() == [1.0] * 8


    def test_pinned_batches():
        data = torch.utils.data.TensorDataset(torch.arange(64.0))
        total = torch.zeros((), device="cuda")
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, pin_memory=True):
            assert batch.is_pinned()
            total += batch.to("cuda", non_blocking=True).sum()
        assert total.item() == 2016


    def test_spawned_child(tmp_path):
        torch.multiprocessing.spawn(children.write_sum, args=(str(tmp_path / "sum"),), nprocs=1)
        assert (tmp_path / "sum").read_text() == "8.0"


    @needs_compiler
    def test_triton_kernel():
        pytest.importorskip("triton")
        from kernels import double

        source = torch.arange(1000.0, device="cuda")
        target = torch.empty_like(source)
        double[(8,)](source, target, 1000, BLOCK=128)
        assert torch.equal(target, 2 * source)


    @needs_compiler
    def test_compiled_function():
        pytest.importorskip("triton")

        @torch.compile
        def one(values):
            return torch.sin(values) ** 2 + torch.cos(values) ** 2

        values = torch.linspace(0, 1, 1000, device="cuda")
        torch.testing.assert_close(one(values), torch.ones_like(values))
    """

PARALLEL = """
    import pytest
    import torch
    import torch.distributed as dist


    def train(model, device):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(64, 512, device=device)).sum()
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss)


    @pytest.mark.distributed(1)
    def test_data_parallel(device):
        model = torch.nn.Linear(512, 8).to(device)
        train(torch.nn.parallel.DistributedDataParallel(model, device_ids=[device]), device)


    @pytest.mark.distributed(1)
    def test_fully_sharded(device):
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:  # Before torch 2.6.
            from torch.distributed._composable.fsdp import fully_shard

        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 8)).to(device)
        fully_shard(model)
        train(model, device)


    @pytest.mark.devices(share="2GiB")
    @pytest.mark.distributed(2, backend="gloo")
    def test_two_ranks_on_one_card(device, rank):
        total = torch.full((4,), rank + 1.0, device=device)
        dist.all_reduce(total)
        assert total.tolist() == [3.0] * 4


    def test_in_the_main_process():
        assert torch.ones(2, device="cuda").sum().item() == 2


    @pytest.mark.devices(1)
    def test_last():
        assert torch.ones(2, device="cuda").sum().item() == 2
    """


def test_an_ordinary_suite_passes(suite: BackgroundSuite, accel: Accel) -> None:
    suite.write("pytest.ini", "[pytest]\naccel = cuda\n")
    suite.write("conftest.py", CONFTEST)
    suite.write("kernels.py", KERNELS)
    suite.write("children.py", CHILDREN)
    suite.write("test_ordinary.py", ORDINARY)
    suite.write("test_parallel.py", PARALLEL)
    run = suite.start("-o", "accel_leaks=fail", "--accel-timeout=120", environment=accel.mask).finish(TIMEOUT)
    names = {name for text in (ORDINARY, PARALLEL) for name in re.findall(r"def (test_\w+)", text)}
    expected = dict.fromkeys(names, "PASSED") | {"test_on_future_cards": "SKIPPED"}
    skipped = dict.fromkeys(("test_triton_kernel", "test_compiled_function"), "SKIPPED").items()
    run.expect(expected | dict(skipped & run.outcomes().items()))
    assert run.ret == 0, run.text


FAULTS = """
    import os
    import signal
    import time
    from pathlib import Path

    import pytest
    import torch

    pytestmark = pytest.mark.devices(1)
    FOLDER = Path(__file__).parent
    KEPT = []


    @pytest.fixture(autouse=True)
    def healthy():
        assert torch.ones(8, device="cuda").sum().item() == 8


    def index_out_of_bounds():
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]


    def tell_other_process(word, answer):
        (FOLDER / word).touch()
        end = time.monotonic() + 60
        while not (FOLDER / answer).exists():
            assert time.monotonic() < end
            time.sleep(0.02)


    def test_expected_assert():
        with pytest.raises(RuntimeError, match="device-side assert"):
            index_out_of_bounds()
            torch.cuda.synchronize()


    def test_unexpected_assert():
        index_out_of_bounds()
        torch.cuda.synchronize()


    def test_assert_without_wait():
        index_out_of_bounds()


    def test_other_process_takes_memory():
        tell_other_process("take", "taken")


    def test_killed_rank():
        memory = torch.ones(2**28, device="cuda")
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)


    def test_illegal_access():
        pytest.importorskip("numpy")
        memory = torch.zeros(8, dtype=torch.uint8, device="cuda")

        class Beyond:
            __cuda_array_interface__ = {
                "shape": (2**42,), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 2
            }

        beyond = torch.as_tensor(Beyond(), device="cuda")[2**41 :][:8] + 1
        torch.cuda.synchronize()


    def test_other_process_gives_memory_back():
        tell_other_process("give", "given")


    @pytest.mark.distributed(1, init=False, timeout=10)
    def test_endless_kernel():
        torch.cuda._sleep(2**60)
        torch.cuda.synchronize()


    @pytest.mark.devices(share="12GiB")
    def test_out_of_memory():
        blocks = []
        while True:
            blocks.append(torch.empty(2**30, dtype=torch.uint8, device="cuda"))


    @pytest.mark.devices(share="12GiB")
    def test_memory_is_free_after_out_of_memory():
        assert torch.cuda.memory_allocated() < 2**28
        assert torch.cuda.memory_reserved() < 2**32


    @pytest.fixture(scope="class")
    def kept_by_class():
        return torch.empty(2**28, dtype=torch.uint8, device="cuda")


    class TestLeak:
        def test_wider_fixture_keeps(self, kept_by_class):
            pass

        def test_leak(self):
            KEPT.append(torch.empty(2**28, dtype=torch.uint8, device="cuda"))


    def test_healthy_after_leak():
        assert not KEPT
    """

OTHER_PROCESS = """
import sys, time
from pathlib import Path

import torch

def wait(name):
    while not Path(sys.argv[1], name).exists():
        time.sleep(0.02)

torch.zeros(1, device="cuda")
wait("take")
memory = torch.ones(2**30, device="cuda")
torch.cuda.synchronize()
Path(sys.argv[1], "taken").touch()
wait("give")
del memory
torch.cuda.empty_cache()
Path(sys.argv[1], "given").touch()
wait("end")
"""


def test_each_fault_fails_its_test_only(suite: BackgroundSuite, accel: Accel) -> None:
    suite.write("pytest.ini", "[pytest]\naccel = cuda\n")
    suite.write("conftest.py", CONFTEST)
    suite.write("test_faults.py", FAULTS)
    with subprocess.Popen([sys.executable, "-c", OTHER_PROCESS, str(suite.path)]) as other:
        try:
            run = suite.start("-o", "accel_leaks=fail", "--accel-timeout=90", environment=accel.mask).finish(TIMEOUT)
        finally:
            other.kill()
    failed = {
        "test_unexpected_assert": r"test_faults\.py:\d+: [\s\S]*AcceleratorError: .* device-side assert triggered",
        "test_assert_without_wait": r"the place in the code is unknown",
        "test_killed_rank": r"the test's process was killed by SIGKILL",
        "test_illegal_access": r"illegal memory access",
        "test_endless_kernel": r"timed out after 10 s: the test's process is at test_faults\.py:\d+",
        "test_out_of_memory": r"test_faults\.py:\d+: OutOfMemoryError",
    }
    expected = dict.fromkeys(re.findall(r"def (test_\w+)", FAULTS), "PASSED")
    expected |= dict.fromkeys(failed, "FAILED") | {"test_leak": "PASSED ERROR"}
    if run.outcomes().get("test_illegal_access") == "SKIPPED":
        expected["test_illegal_access"] = "SKIPPED"
        del failed["test_illegal_access"]
    run.expect(expected)
    for test, pattern in failed.items():
        assert re.search(pattern, run.failure(test)), run.text
    assert "left 256 MiB more allocated on cuda:0 than it had found" in run.failure("TestLeak.test_leak")
    assert "All traceback entries are hidden" not in run.text


WORKERS = """
    import os
    import signal

    import pytest
    import torch

    pytestmark = pytest.mark.devices(1)


    def compute():
        matrix = torch.ones(512, 512, device="cuda", requires_grad=True)
        (matrix @ matrix).sum().backward()
        assert matrix.grad.unique().tolist() == [1024.0]


    @pytest.mark.parametrize("number", range(3))
    def test_whole_card(number):
        compute()


    @pytest.mark.devices(share=0.1)
    @pytest.mark.parametrize("number", range(3))
    def test_share(number):
        compute()


    def test_killed_rank():
        torch.ones(2**26, device="cuda")
        os.kill(os.getpid(), signal.SIGKILL)


    def test_after_killed_rank():
        compute()
    """


def test_four_workers_use_one_card(suite: BackgroundSuite, accel: Accel) -> None:
    suite.write("pytest.ini", "[pytest]\naccel = cuda\n")
    suite.write("conftest.py", CONFTEST)
    for name in "abcd":
        suite.write(f"test_{name}.py", WORKERS)
    run = suite.start("-n4", "-o", "accel_leaks=fail", "--accel-timeout=90", environment=accel.mask).finish(TIMEOUT)
    failed = [name for name, words in run.results.items() if words != ["PASSED"]]
    assert sorted(failed) == [f"test_{name}.py::test_killed_rank" for name in "abcd"], run.text
    assert run.count() == {"PASSED": 28, "FAILED": 4}, run.text
    assert re.findall(r"^FAILED .* - (.*)", run.text, re.MULTILINE) == ["the test's process was killed by SIGKILL"] * 4
