"""Tests of sessions on devices that only torch knows: those of a backend in Python that torch loads by itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.installed_packages import InstalledPackages
from tests.torch_release import needs_torch

if TYPE_CHECKING:
    from tests.features.conftest import Suite

BACKEND = """
import types
import torch

def load():
    module = types.ModuleType("torch.fakeacc")
    module.is_available = lambda: True
    module.started = []
    module.is_initialized = lambda: bool(module.started)

    def synchronize(device):
        if device in module.started:
            raise RuntimeError(f"{device}: kernel failed\\nmore")

    module.synchronize = synchronize
    module.device_count = lambda: 3
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.get_device_name = lambda index: f"Fake {index}"
    torch.utils.rename_privateuse1_backend("fakeacc")
    torch._register_device_module("fakeacc", module)
"""
TESTS = """
    import pytest

    @pytest.mark.devices(2)
    def test_one_process(devices):
        assert [str(device) for device in devices] == ["fakeacc:0", "fakeacc:1"]

    @pytest.mark.distributed(2, backend="gloo")
    def test_ranks_that_see_the_world(device, rank):
        assert str(device) == f"fakeacc:{rank}"

    @pytest.mark.distributed(2, backend="gloo", visible="rank")
    def test_ranks_that_see_their_own(device, rank):
        assert str(device) == f"fakeacc:{rank}"

    @pytest.mark.devices(4)
    def test_too_many(devices): ...

    @pytest.mark.distributed(2, kind="cpu")
    def test_on_the_cpu(device):
        assert str(device) == "cpu"
    """


BROKEN = """
    import pytest
    import torch

    @pytest.mark.devices(1)
    def test_before(): ...

    @pytest.mark.devices(1)
    def test_that_does_not_wait(devices):
        torch.fakeacc.started.append(str(devices[0]))

    @pytest.mark.devices(1)
    def test_after():
        assert not torch.fakeacc.started
        torch.fakeacc.started.append("another device")

    @pytest.mark.devices(1)
    def test_that_fails(devices):
        torch.fakeacc.started.append(str(devices[0]))
        raise ValueError("its own")

    @pytest.fixture
    def starts_late(devices):
        yield
        torch.fakeacc.started.append(str(devices[0]))

    @pytest.mark.devices(1)
    def test_whose_fixture_does_not_wait(starts_late): ...

    @pytest.fixture
    def starts_early(devices):
        torch.fakeacc.started.append(str(devices[0]))

    @pytest.mark.devices(1)
    def test_whose_setup_does_not_wait(starts_early): ...

    @pytest.mark.devices(1)
    def test_last():
        assert not torch.fakeacc.started
    """


@pytest.fixture
def fakeacc(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the backend in the way that pip does."""
    packages = InstalledPackages(suite.path / "site-packages", monkeypatch)
    packages.install("fakeacc-plugin", "torch.backends", "fakeacc = fakeacc_plugin:load", "fakeacc_plugin", BACKEND)
    suite.ini("norecursedirs = site-packages")


@pytest.mark.long
@pytest.mark.usefixtures("fakeacc")
@needs_torch(2, 6)
def test_a_device_error_is_reported_in_the_test_that_caused_it(suite: Suite) -> None:
    suite.write("test_suite.py", BROKEN)
    run = suite.run("--accel", "privateuse1")
    assert run.outcomes() == {
        "test_before": "PASSED",
        "test_that_does_not_wait": "FAILED",
        "test_after": "PASSED",
        "test_that_fails": "FAILED",
        "test_whose_fixture_does_not_wait": "PASSED ERROR",
        "test_whose_setup_does_not_wait": "FAILED",
        "test_last": "PASSED",
    }, run.text
    error = r"RuntimeError: work that the test started on fakeacc:\d has failed: .*: kernel failed\n"
    for test in ("test_that_does_not_wait", "test_whose_fixture_does_not_wait", "test_whose_setup_does_not_wait"):
        assert re.search(error, run.failure(test))
        assert "wait_for_devices" not in run.failure(test)
    assert "ValueError: its own" in run.failure("test_that_fails")


@pytest.mark.usefixtures("fakeacc")
@needs_torch(2, 6)
def test_devices_that_only_torch_knows_are_leased(suite: Suite) -> None:
    suite.write("test_suite.py", TESTS)
    run = suite.run("--accel", "privateuse1")
    assert "accel: privateuse1, 3 devices: Fake 0, Fake 1, Fake 2" in run.text
    assert run.result("test_too_many") == "SKIPPED"
    assert run.count() == {"PASSED": 4, "SKIPPED": 1}
