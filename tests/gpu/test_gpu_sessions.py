"""Tests of whole sessions on a GPU: masks, turns of several workers, memory, and time."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_accel.core.device import Device
    from tests.background_suite import BackgroundSuite
    from tests.gpu.conftest import Inner

pytestmark = pytest.mark.devices(kind="cuda")

MIB = 1024**2
TIMEOUT = 200.0
"""Seconds after which a session counts as hung; shorter than the timeout of a test."""

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
    import os
    from pathlib import Path

    import pytest
    import torch

    def write(name):
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        Path(os.environ["SEEN"], name).write_text(json.dumps([f"GPU-{gpu.uuid}" for gpu in gpus]))

    def test_unmarked():
        write("unmarked.json")

    @pytest.mark.devices(kind="cuda")
    def test_marked(device):
        write("marked.json")
        assert torch.ones(2, device=device).sum().item() == 2
    """


def test_an_inherited_mask_is_kept(
    suite: BackgroundSuite, card: Device, tmp_path_factory: pytest.TempPathFactory
) -> None:
    leaving_one = [card.id, card.id[:20], str(card.index), f"{card.index},-1", f"{card.id},GPU-nonsense"]
    leaving_none = ["", "-1", f"{card.id},{card.id}"]
    suite.write("pytest.ini", "[pytest]\naccel = cuda\n")
    suite.write("test_it.py", SEEN)
    sessions = []
    for mask in (*leaving_one, *leaving_none):
        seen = tmp_path_factory.mktemp("seen")
        variables = {
            "CUDA_VISIBLE_DEVICES": mask,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "SEEN": str(seen),
            "PYTEST_ACCEL_LOCK_DIR": str(seen / "locks"),  # The sessions run side by side, on the same GPU.
        }
        sessions.append((mask, seen, suite.start(environment=variables)))
    for mask, seen, session in sessions:
        run = session.finish(TIMEOUT)
        is_left = mask in leaving_one
        run.expect({"test_unmarked": "PASSED", "test_marked": "PASSED" if is_left else "SKIPPED"})
        # Unmarked tests run with the inherited mask, so torch shows in them what that mask means.
        expected = [card.id] if is_left else []
        assert json.loads((seen / "unmarked.json").read_text()) == expected, run.text
        found = "1 device: " if is_left else "no devices, "
        left = "1" if is_left else "none"
        line = rf"^accel: cuda, {found}.*CUDA_VISIBLE_DEVICES={re.escape(mask)} leaves {left} of \d+"
        assert re.search(line, run.text, re.MULTILINE), run.text
        if is_left:
            assert json.loads((seen / "marked.json").read_text()) == expected, run.text
        else:
            assert re.search(r"accel: 1 skipped for missing hardware.*\n\s+1  needs 1 ", run.text), run.text


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
