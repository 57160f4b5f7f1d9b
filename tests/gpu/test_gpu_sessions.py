"""Tests of whole sessions on a GPU: masks, turns of several workers, memory, and errors."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import subprocess
import sys
import xml.etree.ElementTree
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_accel.core.device import Device
    from tests.gpu.conftest import Inner

pytestmark = pytest.mark.devices(kind="cuda")

MIB = 1024**2

STATE = """
    import contextlib
    import ctypes
    import json
    import os

    import pynvml
    import pytest

    NOT_INITIALIZED = 3


    def cuda_state():
        # cuInit comes before everything else, so a process in which it has not run has no context.
        count = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
        listed = set()
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):
                gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
                listed |= {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)}
        pynvml.nvmlShutdown()
        return {"initialised": count != NOT_INITIALIZED, "listed": os.getpid() in listed}


    @pytest.fixture
    def write_state(pytestconfig):
        (pytestconfig.rootpath / "rank.json").write_text(json.dumps(cuda_state()))


    def pytest_runtest_makereport(item, call):
        if call.when == "call" and item.config.pluginmanager.hasplugin("terminalreporter"):  # Ranks have none.
            (item.config.rootpath / "controller.json").write_text(json.dumps(cuda_state()))
    """


def test_the_controller_has_no_cuda_context(inner: Inner) -> None:
    inner.write(
        conftest=STATE,
        test_it="""
            import pytest
            import torch

            @pytest.fixture
            def tensor(device):
                return torch.ones(8, device=device)

            @pytest.mark.devices(kind="cuda")
            def test_rank(tensor, write_state):
                assert tensor.sum().item() == 8
        """,
    )
    inner.run().assert_outcomes(passed=1)
    rank, controller = (json.loads((inner.path / f"{name}.json").read_text()) for name in ("rank", "controller"))
    assert rank["initialised"]
    assert not controller["initialised"]
    if rank["listed"]:  # In a container, NVML may report other process ids, or none.
        assert not controller["listed"]


SEEN = """
    import json
    from pathlib import Path

    import pytest
    import torch

    def write(name):
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        Path(__file__).with_name(name).write_text(json.dumps([f"GPU-{gpu.uuid}" for gpu in gpus]))

    def test_unmarked():
        write("unmarked.json")

    @pytest.mark.devices(kind="cuda")
    def test_marked(device):
        write("marked.json")
        assert torch.ones(2, device=device).sum().item() == 2
    """


@pytest.mark.parametrize("form", ["uuid", "start of the uuid", "index", "index, then none", "uuid, then nonsense"])
def test_an_inherited_mask_is_kept(inner: Inner, card: Device, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    masks = {
        "uuid": card.id,
        "start of the uuid": card.id[:20],
        "index": str(card.index),
        "index, then none": f"{card.index},-1",
        "uuid, then nonsense": f"{card.id},GPU-nonsense",
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", masks[form])
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    inner.write(test_it=SEEN)
    result = inner.run()
    result.assert_outcomes(passed=2)
    result.stdout.re_match_lines([rf"accel: cuda, 1 device: .*, CUDA_VISIBLE_DEVICES={masks[form]} leaves 1 of \d+"])
    # Unmarked tests run with the inherited mask, so torch shows in them what that mask means.
    assert json.loads((inner.path / "unmarked.json").read_text()) == [card.id]
    assert json.loads((inner.path / "marked.json").read_text()) == [card.id]


@pytest.mark.parametrize("form", ["empty", "-1", "repeated"])
def test_an_inherited_mask_may_hide_every_gpu(
    inner: Inner, card: Device, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    mask = {"empty": "", "-1": "-1", "repeated": f"{card.id},{card.id}"}[form]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    inner.write(test_it=SEEN)
    result = inner.run()
    result.assert_outcomes(passed=1, skipped=1)
    assert json.loads((inner.path / "unmarked.json").read_text()) == []
    result.stdout.re_match_lines([rf"accel: cuda, no devices, .*CUDA_VISIBLE_DEVICES={mask} leaves none of \d+"])
    result.stdout.fnmatch_lines(["*accel: 1 skipped for missing hardware*", "    1  needs 1 *"])


def test_two_workers_on_one_gpu_take_turns(inner: Inner) -> None:
    tests = """
        import os
        from pathlib import Path

        import pytest
        import torch

        def note(word, number):
            with Path(__file__).with_name("log").open("a") as log:
                log.write(f"{word} {number} {os.getpid()}\\n")

        @pytest.mark.devices(kind="cuda")
        @pytest.mark.parametrize("number", range(4))
        def test_alone(number, device):
            note("start", number)
            matrix = torch.rand(1024, 1024, device=device)
            for _ in range(20):
                matrix = torch.nn.functional.normalize(matrix @ matrix)
            torch.cuda.synchronize(device)
            note("end", number)
    """
    inner.write(test_first=tests, test_second=tests)
    result = inner.run("-n2", "--dist=loadfile")
    result.assert_outcomes(passed=8)
    assert set(re.findall(r"\[(gw\d)\].* PASSED", result.stdout.str())) == {"gw0", "gw1"}
    lines = [line.split(maxsplit=1) for line in (inner.path / "log").read_text().splitlines()]
    assert [word for word, _ in lines] == ["start", "end"] * 8
    starts, ends = lines[::2], lines[1::2]
    assert [test for _, test in starts] == [test for _, test in ends]


def test_each_test_has_its_own_memory_peak(inner: Inner) -> None:
    inner.write(
        test_it=f"""
            import pytest
            import torch

            pytestmark = pytest.mark.devices(kind="cuda")

            def test_much(device):
                torch.empty({256 * MIB}, dtype=torch.uint8, device=device)

            def test_little(device):
                torch.empty({MIB}, dtype=torch.uint8, device=device)
        """
    )
    inner.run("--junitxml=report.xml").assert_outcomes(passed=2)
    report = xml.etree.ElementTree.parse(inner.path / "report.xml")
    peaks = {
        case.attrib["name"]: int(found.attrib["value"])
        for case in report.iter("testcase")
        for found in case.iter("property")
        if found.attrib["name"] == "accel_peak_memory"
    }
    assert set(peaks) == {"test_much", "test_little"}
    assert 256 * MIB <= peaks["test_much"] < 512 * MIB
    assert MIB <= peaks["test_little"] < 256 * MIB


def test_leaked_memory_is_reported_and_freed(inner: Inner) -> None:
    inner.write(
        test_it=f"""
            import pytest
            import torch

            pytestmark = pytest.mark.devices(kind="cuda")
            KEPT = []

            @pytest.fixture(scope="module")
            def wider():
                yield torch.empty({256 * MIB}, dtype=torch.uint8, device="cuda:0")

            def test_wider_keeps(wider):
                pass

            def test_leaks(device):
                KEPT.append(torch.empty({256 * MIB}, dtype=torch.uint8, device=device))

            def test_is_another_process(device):
                assert not KEPT
        """
    )
    result = inner.run("--accel-leaks=fail")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*left 256 MiB more allocated on cuda:0 than it had found*"])


TIMES = """
    import json
    import time

    ENDS = []

    def pytest_runtest_logfinish():
        ENDS.append(time.perf_counter())

    def pytest_sessionfinish(session):
        if session.config.pluginmanager.hasplugin("terminalreporter"):  # Ranks have none.
            (session.config.rootpath / "times.json").write_text(json.dumps(ENDS))
    """
TESTS = 300


def _milliseconds(inner: Inner) -> float:
    """Return the median time between the ends of two tests, without the first third of the tests."""
    ends: list[float] = json.loads((inner.path / "times.json").read_text())
    assert len(ends) == TESTS
    late = ends[TESTS // 3 :]
    return 1000 * statistics.median(after - before for before, after in itertools.pairwise(late))


def test_a_warm_test_is_fast(inner: Inner, record_property: Any) -> None:
    inner.write(
        conftest=TIMES,
        test_plain=f"""
            import pytest
            import torch

            @pytest.mark.parametrize("number", range({TESTS}))
            def test_sum(number):
                assert torch.ones(8, device="cuda").sum().item() == 8
        """,
        test_marked=f"""
            import pytest
            import torch

            @pytest.mark.devices(kind="cuda")
            @pytest.mark.parametrize("number", range({TESTS}))
            def test_sum(number, device):
                assert torch.ones(8, device=device).sum().item() == 8
        """,
    )
    inner.run("-q", "-p", "no:accel", "test_plain.py").assert_outcomes(passed=TESTS)
    plain = _milliseconds(inner)
    inner.run("-q", "test_marked.py").assert_outcomes(passed=TESTS)
    warm = _milliseconds(inner)
    print(f"a plain CUDA test {plain:.2f} ms, a warm devices(1) test {warm:.2f} ms, {warm / plain:.2f} times as long")
    record_property("gpu_test_ms", {"plain": round(plain, 3), "warm": round(warm, 3), "ratio": round(warm / plain, 2)})


def test_a_failed_assertion_in_a_kernel_fails_its_test_only(inner: Inner) -> None:
    inner.write(
        test_it="""
        import pytest
        import torch

        pytestmark = pytest.mark.devices(1)


        def test_before(device):
            assert torch.ones(1, device=device).item() == 1


        def test_that_does_not_wait(device):
            torch.zeros(1, device=device)[torch.tensor([5], device=device)]


        def test_after(device):
            assert torch.ones(1, device=device).item() == 1
        """
    )
    run = inner.run("--accel=cuda")
    run.assert_outcomes(passed=2, failed=1)
    run.stdout.fnmatch_lines(["*device-side assert triggered*", "FAILED test_it.py::test_that_does_not_wait*"])


def test_a_gpu_that_another_process_uses_is_busy(inner: Inner) -> None:
    inner.write(test_it="import pytest\n\n\n@pytest.mark.devices\ndef test_it(): ...\n")
    code = "import torch; kept = torch.ones(2**30, device='cuda'); print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "up\n"
        run = inner.run("--accel=cuda", "--accel-busy=skip", "-rs")
        user.communicate("\n")
    run.assert_outcomes(skipped=1)
    run.stdout.fnmatch_lines(["accel: cuda, no devices*; left out as busy: *"])
    inner.run("--accel=cuda").assert_outcomes(passed=1)
