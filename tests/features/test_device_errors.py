"""Tests of unmarked tests that leave a device unusable for their process: every later use of it raises an error.

The device is simulated by a module `torch` with the functions that the plugin calls.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("xdist")

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_SIMULATED_DEVICE = """
    import os
    import sys
    import time
    import types
    from pathlib import Path

    ASSERT = "CUDA error: device-side assert triggered\\nCUDA kernel errors might be asynchronously reported"


    class Device:
        error = None
        stays = True

        def synchronize(self, device=None):
            error = self.error
            if error is not None and not self.stays:
                self.error = None
            if error is not None:
                raise RuntimeError(error)


    def use():
        \"\"\"Return the device of this process, as it is after the import of torch and the first use of CUDA.\"\"\"
        if "torch" not in sys.modules:
            device = Device()
            torch = sys.modules["torch"] = types.ModuleType("torch")
            torch.accelerator = types.SimpleNamespace(current_accelerator=lambda: types.SimpleNamespace(type="cuda"))
            torch.cuda = types.SimpleNamespace(
                is_initialized=lambda: True,
                device_count=lambda: 2,
                current_device=lambda: 0,
                memory_reserved=lambda index: index == 1,
                synchronize=device.synchronize,
                device=device,
            )
        device = sys.modules["torch"].cuda.device
        device.synchronize()
        return device


    def note(name):
        with open("order", "a") as file:
            file.write(f"{name} {os.environ.get('PYTEST_XDIST_WORKER', 'main')} {os.getpid()}\\n")


    def wait_for(name):
        order = Path("order")
        while not order.exists() or f"\\n{name} " not in f"\\n{order.read_text()}":
            time.sleep(0.01)
    """
_TESTS = """
    import pytest
    from simulated import ASSERT, note, use, wait_for


    @pytest.fixture(scope="module")
    def kept():
        yield
        note("torn-down")


    @pytest.mark.parametrize("number", range(12))
    def test_unmarked(number, kept):
        if number > 3:
            wait_for(3)  # Tests remain for the worker that runs test 3, however slow it is.
        note(number)
        device = use()
        if number == 3:
            device.error, device.stays = ASSERT, True
        if number == 5:
            device.error, device.stays = "CUDA error: out of memory", False
    """
_MARKED_TESTS = """
    @pytest.mark.parametrize("number", range(3))
    @pytest.mark.devices(4)
    def test_marked(number):
        note("marked")
    """


def _write(suite: Suite, tests: str = _TESTS) -> None:
    """Write a suite with the simulated device and `tests`."""
    suite.write("simulated.py", _SIMULATED_DEVICE)
    suite.write("test_it.py", tests)
    suite.ini("pythonpath = .")


@pytest.mark.parametrize(
    ("options", "marked"),
    [
        (("-n1",), _MARKED_TESTS),
        pytest.param(("-n2",), "", marks=pytest.mark.long),
        pytest.param(("-n2",), _MARKED_TESTS, marks=pytest.mark.long),
        pytest.param(("-n2", "-o", "accel_schedule=off"), _MARKED_TESTS, marks=pytest.mark.long),
        pytest.param(("-n2", "--dist=worksteal"), "", marks=pytest.mark.long),
        pytest.param(("-n2", "--dist=loadscope"), "", marks=pytest.mark.long),
        pytest.param(("-n2", "--dist=loadgroup"), "", marks=pytest.mark.long),
        pytest.param(("--dist=each", "--tx=1*popen"), "", marks=pytest.mark.long),
    ],
)
def test_a_worker_whose_device_is_unusable_is_replaced(suite: Suite, options: tuple[str, ...], marked: str) -> None:
    _write(suite, _TESTS + marked)
    run = suite.run(*options)
    tests = 12 + 3 * bool(marked)
    assert run.ret == pytest.ExitCode.OK
    assert f"{tests} passed" in run.text
    assert run.text.count("replacing crashed worker") == 1
    assert "crashed while running" not in run.text
    (worker,) = re.findall(
        r"^(gw\d) test_it\.py::test_unmarked\[3\]: cuda:0: CUDA error: device-side assert triggered$",
        run.text,
        re.MULTILINE,
    )
    assert "a worker ends after such a test if tests remain for it, and xdist replaces it" in run.text
    ran = [line.split() for line in suite.read("order")]
    names = [name for name, *_ in ran if name != "torn-down"]
    assert Counter(names) == {str(number): 1 for number in range(12)} | ({"marked": 3} if marked else {})
    own = [name for name, where, _ in ran if where == worker and name != "marked"]
    assert own[own.index("3") :] == ["3", "torn-down"]


def test_without_xdist_the_summary_names_the_unusable_device(suite: Suite) -> None:
    _write(suite)
    run = suite.run()
    assert run.count() == {"PASSED": 4, "FAILED": 8}
    lines = "test_it.py::test_unmarked[3]: cuda:0: CUDA error: device-side assert triggered\nthe tests after it ran in"
    assert run.text.count("left a device unusable") == run.text.count(lines) == 1


@pytest.mark.long
def test_no_test_is_lost_silently_if_xdist_replaces_no_more_workers(suite: Suite) -> None:
    _write(suite, _TESTS.replace("number == 3", "number in (0, 1, 2)"))
    run = suite.run("-n1", "--max-worker-restart=1")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert "12 passed" not in run.text
    assert "maximum crashed workers reached: 1" in run.text
    run = suite.run("-n1", "--max-worker-restart=0")
    assert run.count() == {"PASSED": 1, "FAILED": 11}
    assert "the workers were not replaced (--max-worker-restart 0)" in run.text


@pytest.mark.long
def test_the_last_test_of_a_worker_needs_no_replacement(suite: Suite) -> None:
    _write(suite, _TESTS.replace("number == 3", "number == 11"))
    run = suite.run("-n1")
    assert "12 passed" in run.text
    assert "replacing" not in run.text
    assert "gw0 test_it.py::test_unmarked[11]: cuda:0: CUDA error: device-side assert triggered" in run.text
