"""Tests of each kind with a fake of the package that adds it to torch, which is imported only to verify devices."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_accel.core.device import Device, Vendor
from pytest_accel.core.kinds import OWN_KINDS
from pytest_accel.hardware.registry import make_vendor

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "npu": "torch_npu",
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "hpu": "habana_frameworks",
    "tpu": "torch_xla",
    "neuron": "torch_neuronx",
}
VERIFY = """
import os, pickle, sys
from pytest_accel.core.device import MaskError
from pytest_accel.hardware.registry import make_vendor

devices = pickle.loads(bytes.fromhex(sys.argv[2]))
vendor = make_vendor(sys.argv[1])
vendor.verify(devices, os.environ)
print("right")
try:
    vendor.verify(devices[:1], os.environ)
except MaskError as error:
    print(error)
"""
TORCH_PACKAGE = """
    import types
    import torch

    module = types.ModuleType("torch.{kind}")
    module.device_count = lambda: 2
    torch.utils.rename_privateuse1_backend("{kind}")
    torch._register_device_module("{kind}", module)
    """
XLA = {"torch_xla/runtime.py": "addressable_device_count = lambda: 2", "torch_xla/distributed/xla_backend.py": ""}
HABANA = {"core/__init__.py": "", "hpu/__init__.py": "device_count = lambda: 8", "distributed/hccl/__init__.py": ""}

Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Provide a function that runs Python code which can import `files`, and returns the lines that it prints."""

    def run(code: str, files: dict[str, str], *arguments: str, **environ: str) -> list[str]:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
            for folder in file.relative_to(tmp_path).parents[:-1]:
                (tmp_path / folder / "__init__.py").touch()
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), **environ},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def _pickle_devices(kind: str) -> str:
    """Return two devices of `kind`, pickled and in hexadecimal."""
    return pickle.dumps(tuple(Device(kind=kind, id=f"{kind}-{n}", index=n, name="x") for n in (4, 2))).hex()


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_each_kind_has_a_module_with_its_vendor(kind: str) -> None:
    vendor = make_vendor(kind)
    assert isinstance(vendor, Vendor)
    assert vendor.kind == kind


@pytest.mark.parametrize("kind", sorted({*OWN_KINDS} - {"cpu", "sim"}))
def test_a_kind_takes_no_argument(kind: str) -> None:
    with pytest.raises(ValueError, match=f"^--accel {kind}:1: {kind} takes nothing after a colon$"):
        make_vendor(kind, "1")


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_missing_package_is_named(kind: str) -> None:
    installed = importlib.util.find_spec(PACKAGES[kind]) is not None
    assert make_vendor(kind).lacking() == (None if installed else f"{PACKAGES[kind]} is not installed")


def test_discovery_and_masks_import_no_package_and_start_no_process(run: Run) -> None:
    code = """
import json, sys
from pytest_accel.hardware.registry import make_vendor

starts, started = ("subprocess.Popen", "os.fork", "os.exec", "os.posix_spawn"), []
sys.addaudithook(lambda event, _: started.append(event) if event in starts else None)
packages = json.loads(sys.argv[1])
for kind in packages:
    vendor = make_vendor(kind)
    devices = vendor.discover()
    assert vendor.lacking() is None, vendor.lacking()
    vendor.mask(devices, {})
    vendor.torch_devices(vendor.fastest(vendor.visible(devices, {})))
print(json.dumps([started, sorted({"torch", *packages.values()} & sys.modules.keys())]))
"""
    files = {f"{package}/__init__.py": "raise SystemExit('it is imported')" for package in PACKAGES.values()}
    assert json.loads(run(code, files, json.dumps(PACKAGES))[-1]) == [[], []]


@pytest.mark.parametrize("kind", ["npu", "mlu", "musa"])
def test_verification_imports_the_package_to_count_devices(run: Run, kind: str) -> None:
    files = {f"{PACKAGES[kind]}/__init__.py": TORCH_PACKAGE.format(kind=kind)}
    right, error = run(VERIFY, files, kind, _pickle_devices(kind))
    assert right == "right"
    assert f"should see 1 {kind} devices ({kind}-4) but sees 2 ({kind}:0, {kind}:1); environment: no mask" in error


@pytest.mark.parametrize(("kind", "mask"), [("tpu", "TPU_VISIBLE_CHIPS"), ("neuron", "NEURON_RT_VISIBLE_CORES")])
def test_verification_imports_torch_xla_to_count_devices(run: Run, kind: str, mask: str) -> None:
    files = XLA | ({"torch_neuronx/__init__.py": ""} if kind == "neuron" else {})
    right, error = run(VERIFY, files, kind, _pickle_devices(kind), **{mask: "2,4"})
    assert right == "right"
    assert f"should see 1 {kind} devices ({kind}-4) but sees 2 (xla:0, xla:1); environment: {mask}='2,4'" in error


def test_verification_imports_the_package_of_gaudi_to_count_devices(run: Run) -> None:
    files = {f"habana_frameworks/torch/{name}": text for name, text in HABANA.items()}
    right, error = run(VERIFY, files, "hpu", _pickle_devices("hpu"), HABANA_VISIBLE_MODULES="4,2")
    assert right == "right"
    assert "should see 1 hpu devices (hpu-4) but sees 2 (module 4, module 2)" in error
