"""Tests of ``--accel-advise``: the advice at the end of a session on marks, and on tests that wait.

The devices are simulated: the functions of `torch.xpu` that the plugin calls are replaced.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from pytest_accel.features.planning import advice
from tests.features.test_published_kinds import Packages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.features.conftest import Suite

_KIND = """
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.vendors.sim import Sim


class Memory:
    \"\"\"The memory of a rank's devices, as torch would count it.\"\"\"

    def __init__(self, torch):
        self.peaks = {}
        torch.xpu.set_device = lambda device: None
        torch.xpu.is_initialized = lambda: True
        torch.xpu.synchronize = lambda device: None
        torch.xpu.memory_allocated = lambda device: 0
        torch.xpu.set_per_process_memory_fraction = lambda fraction, device: None
        torch.xpu.max_memory_allocated = lambda device: self.peaks.get(str(device), 0)
        torch.xpu.reset_peak_memory_stats = lambda device: self.peaks.pop(str(device), None)
        torch.xpu.allocate = self.peaks.__setitem__


class Fake(Sim):
    facts = KINDS["sim"]._replace(name="fake", torch="xpu", torch_index="mask")

    def verify(self, devices, environ):
        import torch

        super().verify(devices, environ)
        Memory(torch)


def make(argument):
    return Fake.make(Fake.facts, argument)
"""
_SUITE = """
    import pytest

    GIB = 1024**3


    def allocate(device, size):
        import torch

        torch.xpu.allocate(device, size)


    @pytest.mark.parametrize("size", [1, 2])
    def test_small(size):
        allocate("xpu:0", size * GIB)


    def test_two_devices():
        allocate("xpu:0", 10 * GIB)


    def test_large():
        allocate("xpu:0", 14 * GIB)


    def test_ranks(rank):
        pass


    @pytest.mark.distributed(2)
    def test_one_rank_of_two(rank):
        if rank == 0:
            allocate("xpu:0", GIB)


    @pytest.mark.devices
    def test_has_a_mark_in_its_file():
        allocate("xpu:0", 3 * GIB)


    @pytest.mark.devices
    def test_fails():
        allocate("xpu:0", GIB)
        assert False


    def test_plain():
        pass
    """
_RULES = """
    test_it.py::test_small: devices(1, memory="15GiB")
    test_it.py::test_two_devices: devices(2)
    test_it.py::test_large: devices
    test_it.py::test_ranks: distributed(2, timeout=60)
"""


@pytest.fixture
def fake_suite(suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Return a suite and the kind `fake`, with two simulated devices of 16 GiB each in the file ``machine.toml``."""
    packages = Packages(tmp_path / "packages")
    packages.install("fake-accel", "fake = fake_accel:make", "fake_accel", _KIND)
    monkeypatch.setenv("PYTHONPATH", str(packages.folder))
    suite.write("machine.toml", 2 * '[[device]]\nmemory = "16GiB"\n')
    suite.write("test_it.py", _SUITE)
    return suite


def _advice(text: str) -> list[str]:
    """Return the lines of the advice in the output `text` of a session."""
    _, _, part = text.partition("accel: advice (--accel-advise)")
    return [line for line in part.partition("\n=")[0].splitlines()[1:] if line]


@pytest.mark.parametrize("options", [(), pytest.param(("-n2",), marks=pytest.mark.long)], ids=["no-xdist", "xdist"])
def test_marks_that_ask_for_more_than_tests_have_used_are_named(fake_suite: Suite, options: tuple[str, ...]) -> None:
    fake_suite.ini("accel_rules =" + _RULES)
    run = fake_suite.run("--accel=fake:machine.toml", "--accel-advise", *options)
    assert run.count() == {"PASSED": 8, "FAILED": 1}
    lines = _advice(run.text)
    end = next(number for number, line in enumerate(lines) if line.startswith("7 tests ran for "))
    start = "  test_it.py::"
    assert lines[0] == "marks that ask for more than 7 tests have used:"
    # The lines below `end` name the tests that waited longest, which vary.
    assert sorted(line.removeprefix(start) for line in lines[:end] if line.startswith(start)) == [
        "test_has_a_mark_in_its_file: its peak is 3 GiB, 3 such tests fit on a device: share=0.333",
        "test_one_rank_of_two: torch has allocated nothing on the devices of rank 1 of 2",
        "test_ranks: torch has allocated nothing on its devices: kind='cpu'",
        "test_small: memory='15GiB', and its peak is 2 GiB: memory='4GiB'; "
        "its peak is 2 GiB, 4 such tests fit on a device: share=0.25",
        "test_two_devices: torch has allocated nothing on the last 1 of 2 devices: n=1",
    ]
    assert re.fullmatch(r"7 tests ran for .* and waited for devices and new ranks for .*", lines[end])


@pytest.mark.parametrize("options", [(), pytest.param(("-n2",), marks=pytest.mark.long)], ids=["no-xdist", "xdist"])
def test_tests_with_one_node_id_are_measured_separately(fake_suite: Suite, options: tuple[str, ...]) -> None:
    fake_suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.devices
        @pytest.mark.parametrize("b", ["z", "y-z"])
        @pytest.mark.parametrize("a", ["x", "x-y"])
        def test_same(a, b):
            import torch

            torch.xpu.allocate("xpu:0", (14 if (a, b) == ("x", "y-z") else 1) * 1024**3)
        """,
    )
    run = fake_suite.run("--accel=fake:machine.toml", "--accel-advise", *options)
    assert run.results["test_it.py::test_same[x-y-z]"] == ["PASSED"] * 2, run.text
    expected = "no advice on marks: 4 tests measured, and none asks for much more than it has used"
    assert _advice(run.text)[0] == expected, run.text


def test_the_reason_is_given_if_there_is_no_advice(suite: Suite) -> None:
    suite.write("test_it.py", "import pytest\n\n@pytest.mark.devices\ndef test_it(): ...\n\ndef test_plain(): ...\n")
    lines = _advice(suite.run("--accel-advise").text)
    assert lines[0] == "no advice on marks: torch does not count the memory of these devices"
    assert _advice(suite.run("--accel-advise", "-k", "plain").text) == [
        "no advice on marks: no test with one mark passed on a device"
    ]
    assert "accel: advice" not in suite.run("--junitxml=junit.xml").text
    assert "accel_run" not in (suite.path / "junit.xml").read_text()


def _measurement(name: str, *, ran: float, waited: float) -> advice.Measurement:
    return advice.Measurement(f"test_it.py::{name}", "devices", {}, ("sim-0",), ((0,),), ran, waited)


def test_advice_names_tests_that_wait_longer_than_they_run() -> None:
    slow = [_measurement(f"test_{n}", ran=1, waited=2 + n) for n in range(12)]
    lines = list(advice.about_waiting([_measurement("test_quick", ran=0.1, waited=0.4), *slow]))
    assert lines[0] == "13 tests ran for 12.1 s and waited for devices and new ranks for 90.4 s"
    assert lines[1] == "  test_it.py::test_11: ran for 1.0 s, waited for 13.0 s"
    assert lines[-1] == "  and 2 tests more that waited longer than they ran"
    assert len(lines) == 12
