"""Tests of the table of kinds, and of what the vendors of all kinds have in common."""

from __future__ import annotations

import importlib.util
import json
import pickle
import platform
import re
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.device import Device, MaskError, Vendor
from pytest_accel.core.kinds import KINDS
from pytest_accel.forkserver.preload import unfit
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.hardware.vendors import privateuse1
from pytest_accel.hardware.vendors.base_vendor import BaseVendor
from tests.hardware.conftest import Run

PACKAGES = {kind.name: kind.package for kind in KINDS.values() if kind.package is not None}
MASKED = [name for name in KINDS if KINDS[name].masks and name != "sim"]
VERIFY = """
import os, pickle, sys
from pytest_accel.core.device import MaskError
from pytest_accel.hardware.registry import make_vendor

devices = pickle.loads(bytes.fromhex(sys.argv[2]))
vendor = make_vendor(sys.argv[1])
vendor.verify(devices, os.environ)
print("right")
try:
    vendor.compare(devices[:1], vendor.seen(os.environ), os.environ)
except MaskError as error:
    print(error)
"""
TORCH_PACKAGE = """
    import types
    import torch

    module = types.ModuleType("torch.npu")
    module.device_count = lambda: 2
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", module)
    """
XLA = {"torch_xla/runtime.py": "addressable_device_count = lambda: 2", "torch_xla/distributed/xla_backend.py": ""}
HABANA = {
    "habana_frameworks/torch/core/__init__.py": "",
    "habana_frameworks/torch/hpu/__init__.py": "device_count = lambda: 8",
    "habana_frameworks/torch/distributed/hccl/__init__.py": "",
}


def _own(kind: str) -> BaseVendor:
    vendor = make_vendor(kind)
    assert isinstance(vendor, BaseVendor)
    return vendor


def _devices(kind: str, *numbers: int) -> tuple[Device, ...]:
    """Return devices of `kind`. Their ids are valid in masks of kinds that name devices by id."""
    prefix = "GPU-" if kind in ("cuda", "rocm") else f"{kind}-"
    return tuple(Device(kind, f"{prefix}{n:016}", n, "x") for n in numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_vendor(kind: str) -> None:
    vendor = make_vendor(kind)
    assert isinstance(vendor, Vendor)
    assert (vendor.kind, vendor.hardware) == (kind, kind not in ("cpu", "sim"))
    if not vendor.mask_variables and kind != "cpu":
        devices = _devices(kind, 0)
        assert vendor.mask(devices, {}) == vendor.mask((), {}) == {}
        assert vendor.visible(devices, {"CUDA_VISIBLE_DEVICES": ""}) == vendor.fastest(devices) == devices


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_missing_package_is_named(kind: str) -> None:
    installed = importlib.util.find_spec(PACKAGES[kind]) is not None
    assert make_vendor(kind).lacking() == (None if installed else f"{PACKAGES[kind]} is not installed")


@pytest.mark.parametrize("name", sorted({kind.torch_type for kind in KINDS.values() if kind.hardware}))
def test_ranks_are_not_forked_from_a_process_with_the_runtime_of_any_kind(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    started, idle = SimpleNamespace(is_initialized=lambda: True), SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=idle, cpu=started))
    assert unfit(known=sys.modules, threads=10**6) is None
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(**{"cuda": idle, name: started}))
    assert unfit(known=sys.modules, threads=10**6) == f"initialises the {name} runtime"


def test_packages_that_belong_to_a_kind_are_no_unknown_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = [*PACKAGES.values(), "intel_extension_for_pytorch", "acme"]
    points = [EntryPoint(f"{package}-name", f"{package}.plugin:load", "torch.backends") for package in packages]
    monkeypatch.setattr(privateuse1, "entry_points", lambda group: points)
    assert privateuse1.unknown_backends() == ("acme-name",)


NPU, MLU, MODULES, MODULE = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "MLU_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "HLS_MODULE_ID",
)
CHIPS, OLD_CHIPS, RUNTIME = "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "PJRT_DEVICE"
SHAPES = ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
CORES, COUNT = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"
READINGS: dict[tuple[str, str], dict[str, str | None]] = {
    ("npu", NPU): {"3,1": "31", "": "", "-1": "", "1,9": None, "1,1": None, "1, 2": None, "0-2": None, "1,x": None},
    ("mlu", MLU): {"2,0": "20"},
    ("hpu", MODULES): {"3,0": "30"},
    ("hpu", MODULE): {"3": "3"},
    ("tpu", CHIPS): {"2,0": "20"},
    ("tpu", OLD_CHIPS): {"3": "3"},
    ("tpu", RUNTIME): {"CPU": "", "TPU": "01234567"},
    ("neuron", CORES): {"3": "3", "1-3": "123", "4,0-1": "401", "6-9,0": None, "0--1": None, "0-99999": None},
    ("neuron", COUNT): {"3": "012", "0": "01234567"},
    ("neuron", RUNTIME): {"CPU": ""},
}  # fmt: skip
"""The numbers of the devices, of eight, that each text of a mask leaves; None: none, with a note."""


@pytest.mark.parametrize(
    ("kind", "environ", "left"),
    [
        *((kind, {name: text}, left) for (kind, name), texts in READINGS.items() for text, left in texts.items()),
        ("npu", {NPU: "1", RUNTIME: "CPU"}, "1"),
        ("hpu", {MODULES: "1,2", MODULE: "2"}, "2"),
        ("hpu", {MODULES: "1,2", MODULE: "0"}, None),
        ("tpu", {CHIPS: "2", RUNTIME: "CPU"}, ""),
        ("neuron", {CORES: "2", COUNT: "1"}, "2"),
    ],
)
def test_masks_select_devices(kind: str, environ: dict[str, str], left: str | None) -> None:
    devices, vendor = _devices(kind, *range(8)), make_vendor(kind)
    assert "".join(str(device.index) for device in vendor.visible(devices, environ)) == (left or "")
    name, text = list(environ.items())[-1]
    note = f"no device is used: {name}={text!r} is no list of numbers of devices"
    assert vendor.notes == (() if left is not None else (note,))
    assert vendor.visible(devices, {"CUDA_VISIBLE_DEVICES": ""}) == devices


@pytest.mark.parametrize("kind", [kind for kind in MASKED if kind != "rocm"])
@given(data=st.data())
def test_a_written_mask_shows_the_chosen_devices_under_the_names_of_torch(kind: str, data: st.DataObject) -> None:
    vendor, devices = make_vendor(kind), _devices(kind, *range(4))
    texts = st.sampled_from(("", "2", "0,1", "2,0"))
    inherited = data.draw(st.dictionaries(st.sampled_from(KINDS[kind].masks), texts))
    chosen = tuple(data.draw(st.permutations(devices)))[: data.draw(st.integers(0, 4))]
    # Each process of the session gets a pickled copy of the vendor.
    changes = pickle.loads(pickle.dumps(vendor)).mask(chosen, inherited)
    after = {name: value for name, value in {**inherited, **changes}.items() if value is not None}
    seen = vendor.visible(devices, after)
    assert set(seen) == set(chosen)
    counted = seen if KINDS[kind].torch_index == "mask" else sorted(seen, key=lambda device: device.index)
    names = {device: f"{KINDS[kind].torch_type}:{position}" for position, device in enumerate(counted)}
    assert vendor.torch_devices(chosen) == tuple(names[device] for device in chosen)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("cuda", {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ("rocm", {"HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": None}),
        ("hpu", {MODULES: "", MODULE: None}),
        ("npu", {NPU: "-1"}),
        ("mlu", {MLU: ""}),
        ("tpu", {RUNTIME: "CPU", CHIPS: "", OLD_CHIPS: None, **dict.fromkeys(SHAPES)}),
        ("neuron", {RUNTIME: "CPU", CORES: "", COUNT: None}),
    ],
)
def test_a_mask_without_devices_hides_all(kind: str, changes: dict[str, str | None]) -> None:
    assert make_vendor(kind).mask((), {}) == changes


def test_a_mac_with_apple_silicon_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = _own("mps")
    for system, machine, found in (("darwin", "arm64", 1), ("darwin", "x86_64", 0), ("linux", "arm64", 0)):
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert vendor.discover() == (Device("mps", "mps-0", 0, "Apple GPU"),) * found
    device = Device("mps", "mps-0", 0, "Apple GPU")
    vendor.compare([device], ["mps"], {})
    vendor.compare([], ["mps"], {})
    with pytest.raises(MaskError, match=r"should see 1 mps devices \(mps-0\) but sees 0"):
        vendor.verify([device], {})


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


@pytest.mark.parametrize(
    ("kind", "files", "variable", "seen"),
    [
        ("npu", {"torch_npu/__init__.py": TORCH_PACKAGE}, "ASCEND_RT_VISIBLE_DEVICES", "npu:0, npu:1"),
        ("tpu", XLA, "TPU_VISIBLE_CHIPS", "xla:0, xla:1"),
        ("neuron", {**XLA, "torch_neuronx/__init__.py": ""}, "NEURON_RT_VISIBLE_CORES", "xla:0, xla:1"),
        ("hpu", HABANA, MODULES, ""),
    ],
)
def test_verification_imports_the_package_to_count_devices(
    run: Run, kind: str, files: dict[str, str], variable: str, seen: str
) -> None:
    devices = _devices(kind, 4, 2)
    mask = "4,2" if kind == "hpu" else "2,4"
    right, *errors = run(VERIFY, files, kind, pickle.dumps(devices).hex(), **{variable: mask})
    assert right == "right"
    sees = f"should see 1 {kind} devices ({devices[0].id}) but sees 2 ({seen}); environment: {variable}='{mask}'"
    assert [sees in error for error in errors] == [True] * (kind != "hpu"), errors


@pytest.mark.parametrize(
    ("kind", "environ", "shown"),
    [
        (
            "cuda",
            {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "x"},
            "CUDA_DEVICE_ORDER='x' CUDA_VISIBLE_DEVICES='0'",
        ),
        ("xpu", {"ONEAPI_DEVICE_SELECTOR": "*:*", "ZES_ENABLE_SYSMAN": "1"}, "ONEAPI_DEVICE_SELECTOR='*:*'"),
    ],
)
def test_the_error_of_a_mask_shows_both_sides_and_the_environment(
    kind: str, environ: dict[str, str], shown: str
) -> None:
    devices = _devices(kind, 4)
    message = f"the process should see 1 {kind} devices ({devices[0].id}) but sees 0 (none); environment: {shown}; why"
    with pytest.raises(MaskError, match=f"^{re.escape(message)}$"):
        _own(kind).compare(devices, [], {**environ, "HOME": "/"}, "; why")
