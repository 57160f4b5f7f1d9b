"""Tests of ``--accel-advise``: the advice at the end of a session on marks, rules and the number of workers.

The devices are simulated: the functions of `torch.xpu` that the plugin calls are replaced.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.order.test_demand import Demand
from pytest_accel.features.planning import advice
from pytest_accel.features.planning.forecast import SuiteOnMachine, Times
from pytest_accel.hardware.inventory import KindSpec, Machine
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
    import json
    from pathlib import Path

    import pytest

    GIB = 1024**3


    def allocate(device, size):
        import torch

        torch.xpu.allocate(device, size)


    @pytest.fixture(autouse=True)
    def marks(request):
        marks = {mark.name: [list(mark.args), mark.kwargs] for mark in request.node.iter_markers()}
        marks.pop("parametrize", None)
        Path(f"{request.node.originalname}.json").write_text(json.dumps(marks))


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
_ADVISED_RULES = [
    "test_it.py::test_small: devices(1, memory='4GiB', share=0.25)",
    "test_it.py::test_two_devices: devices(1)",
    "test_it.py::test_ranks: distributed(2, timeout=60, device='cpu')",
]


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


def _about_marks(lines: list[str]) -> list[str]:
    """Return the lines above the one on time. The lines below it name the tests that waited longest, which vary."""
    return lines[: next(number for number, line in enumerate(lines) if line.startswith("7 tests ran for "))]


def _marks(suite: Suite, test: str) -> dict[str, list[object]]:
    """Return the arguments of the marks that `test` had in the last session, by the name of the mark."""
    found: dict[str, list[object]] = json.loads((suite.path / f"{test}.json").read_text())
    return found


@pytest.mark.parametrize("options", [(), pytest.param(("-n2",), marks=pytest.mark.long)], ids=["no-xdist", "xdist"])
def test_the_pasted_rules_give_the_advised_marks(fake_suite: Suite, options: tuple[str, ...]) -> None:
    ini = fake_suite._ini
    fake_suite.ini("accel_rules =" + _RULES)
    run = fake_suite.run("--accel=fake:machine.toml", "--accel-advise", *options)
    assert run.count() == {"PASSED": 8, "FAILED": 1}
    lines = _advice(run.text)
    assert "marks that ask for more than 7 tests have used:" in lines
    assert (
        "  test_it.py::test_small: memory='15GiB', and its peak is 2 GiB: memory='4GiB'; "
        "its peak is 2 GiB, 4 such tests fit on a device: share=0.25"
    ) in lines
    assert ("  test_it.py::test_two_devices: torch has allocated nothing on the last 1 of 2 devices: n=1") in lines
    assert "  test_it.py::test_one_rank_of_two: torch has allocated nothing on the devices of rank 1 of 2" in lines
    assert "    test_it.py::test_has_a_mark_in_its_file: @pytest.mark.devices(share=0.333)" in lines
    assert not any("test_large" in line or "test_fails" in line for line in _about_marks(lines))
    start = lines.index("for accel_rules in the ini file, above the rules that are there:") + 1
    rules = [line.strip() for line in lines[start : start + 3]]
    assert sorted(rules) == sorted(_ADVISED_RULES)
    assert lines[start + 3] == "for the test files (rules do not replace marks in them):"
    assert any(re.fullmatch(r"7 tests ran for .* and waited for devices and new ranks for .*", line) for line in lines)

    fake_suite._ini = ini
    fake_suite.ini("accel_rules =\n" + "\n".join(f"    {rule}" for rule in rules) + _RULES)
    run = fake_suite.run("--accel=fake:machine.toml", "--accel-advise", *options)
    assert run.count() == {"PASSED": 8, "FAILED": 1}
    assert _marks(fake_suite, "test_small") == {"devices": [[1], {"memory": "4GiB", "share": 0.25}]}
    assert _marks(fake_suite, "test_two_devices") == {"devices": [[1], {}]}
    assert _marks(fake_suite, "test_ranks") == {"distributed": [[2], {"timeout": 60, "device": "cpu"}]}
    marks = _about_marks(_advice(run.text))
    assert not any("test_small" in line or "test_ranks" in line for line in marks)


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
    assert lines[-1].startswith("no advice on -n: by the plan, none saves a second of the ")
    assert _advice(suite.run("--accel-advise", "-k", "plain").text)[:2] == [
        "no advice on marks: no test with one mark passed on a device",
        "no advice on -n: the order of the tests is xdist's, or no test needs devices or ranks",
    ]
    assert "accel: advice" not in suite.run("--junitxml=junit.xml").text
    assert "accel_run" not in (suite.path / "junit.xml").read_text()


def _measurement(name: str, *, ran: float, waited: float) -> advice.Measurement:
    return advice.Measurement(f"test_it.py::{name}", ("devices(1)",), False, ("sim-0",), ((0,),), ran, waited)


def test_advice_names_tests_that_wait_longer_than_they_run() -> None:
    slow = [_measurement(f"test_{n}", ran=1, waited=2 + n) for n in range(12)]
    lines = list(advice.about_waiting([_measurement("test_quick", ran=0.1, waited=0.4), *slow]))
    assert lines[0] == "13 tests ran for 12.1 s and waited for devices and new ranks for 90.4 s"
    assert lines[1] == "  test_it.py::test_11: ran for 1.0 s, waited for 13.0 s"
    assert lines[-1] == "  and 2 tests more that waited longer than they ran"
    assert len(lines) == 12


@pytest.mark.parametrize(
    ("workers", "line"),
    [
        (1, "-n 4 is the best by the plan: 20.0 s for the tests, and 80.0 s with -n 1 (--accel-plan shows more)"),
        (4, "no advice on -n: by the plan, none saves a second of the 20.0 s with -n 4"),
        (16, "-n 4 is the best by the plan: 20.0 s for the tests, and 20.0 s with -n 16 (--accel-plan shows more)"),
    ],
)
def test_advice_names_the_best_number_of_workers(workers: int, line: str) -> None:
    key = WorldKey("sim", DeviceNeed(1), 1, grouped=False, devices_per_rank=1)
    times = Times((10.0,) * 8, (10.0,) * 8, 0, 0, 1.0)
    demand = Demand.of((index, key) for index in range(8))
    suite = SuiteOnMachine([f"test_{n}" for n in range(8)], demand, times, Machine(KindSpec("sim", "4")), 2)
    assert list(advice.about_workers(suite, list(suite.forecasts()), workers)) == [line]
