"""Tests of unmarked tests that leave a device unusable for their process: every later use of it raises an error.

The device is simulated by a module `torch` with the functions that the plugin calls.
"""

from __future__ import annotations

from tests.features.conftest import Suite

_SIMULATED_DEVICE = """
    import sys
    import types

    ASSERT = "CUDA error: device-side assert triggered\\nCUDA kernel errors might be asynchronously reported"


    class Device:
        error = None

        def synchronize(self, device=None):
            if self.error is not None:
                raise RuntimeError(self.error)


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
    """
_TESTS = """
    import pytest
    from simulated import ASSERT, use


    @pytest.mark.parametrize("number", range(12))
    def test_unmarked(number):
        device = use()
        if number == 3:
            device.error = ASSERT


    @pytest.mark.parametrize("number", range(3))
    @pytest.mark.devices(4)
    def test_marked(number): ...
    """


def test_later_tests_of_the_process_say_which_test_has_left_the_device_unusable(suite: Suite) -> None:
    suite.without_torch()
    suite.write("simulated.py", _SIMULATED_DEVICE)
    suite.write("test_it.py", _TESTS)
    suite.ini("pythonpath = .")
    run = suite.run()
    passed = {f"test_unmarked[{number}]" for number in range(4)} | {f"test_marked[{number}]" for number in range(3)}
    failed = [f"test_unmarked[{number}]" for number in range(4, 12)]
    run.expect(dict.fromkeys(passed, "PASSED") | dict.fromkeys(failed, "FAILED"))
    sentence = (
        "test_it.py::test_unmarked[3] has left a device unusable for this process: cuda:0: CUDA error: device-side"
    )
    assert run.text.count(sentence) == len(failed)
