"""Tests of sessions on devices that only torch knows: those of a backend in Python that torch loads by itself."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite
from tests.installed_packages import InstalledPackages
from tests.torch_release import needs_torch

BACKEND = """
import types
import torch

def load():
    module = types.ModuleType("torch.fakeacc")
    module.is_available = lambda: True
    module.is_initialized = lambda: False
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


@pytest.fixture
def fakeacc(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the backend in the way that pip does."""
    packages = InstalledPackages(suite.path / "site-packages", monkeypatch)
    packages.install("fakeacc-plugin", "torch.backends", "fakeacc = fakeacc_plugin:load", "fakeacc_plugin", BACKEND)
    suite.ini("norecursedirs = site-packages")


@pytest.mark.usefixtures("fakeacc")
@needs_torch(2, 6)
def test_devices_that_only_torch_knows_are_leased(suite: Suite) -> None:
    suite.write("test_suite.py", TESTS)
    run = suite.run("--accel", "privateuse1")
    assert "accel: privateuse1, 3 devices: Fake 0, Fake 1, Fake 2" in run.text
    assert run.result("test_too_many") == "SKIPPED"
    assert run.count() == {"PASSED": 4, "SKIPPED": 1}
