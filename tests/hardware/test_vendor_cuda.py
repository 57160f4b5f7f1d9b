"""Tests of the kind `cuda`, with a fake NVIDIA driver."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

from pytest_accel.core.device import Device, MaskError
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.vendors.cuda import Cuda
from tests.hardware.conftest import OnMachine

NO_PERMISSION, NOT_SUPPORTED, UNKNOWN = 4, 3, 999
GIB = 1024**3


def _uuid(digit: int) -> str:
    return "-".join(str(digit) * length for length in (8, 4, 4, 4, 12))


def _gpu(digit: int, name: str = "NVIDIA A100", gib: int = 80, bus: int | None = None, *more: str) -> tuple[str, ...]:
    """Return the facts of a GPU whose UUID repeats `digit`, half of whose memory is free."""
    return (
        f"gpu GPU-{_uuid(digit)}",
        f"name {name}",
        f"memory {gib * GIB} {gib * GIB // 2}",
        "capability 8 0",
        "speed 6912 1410",
        # No real device is in this PCI domain, so that no file of this machine gives its NUMA node.
        f"pci ff00 {digit if bus is None else bus:x} 0",
        *more,
    )


MIXED_GPUS = (*_gpu(1, "NVIDIA T4", 15), *_gpu(2, "NVIDIA A100"), *_gpu(3, "NVIDIA GV100", 32))

DISCOVER = """
import dataclasses, json
from pytest_accel.hardware.registry import make_vendor
vendor = make_vendor("cuda")
print(json.dumps({"devices": [dataclasses.asdict(device) for device in vendor.discover()], "notes": vendor.notes}))
"""

# Prints each device as the digit that its UUID repeats.
ORDERS = """
import json, os
from pytest_accel.hardware.registry import make_vendor
vendor = make_vendor("cuda")
devices = vendor.discover()
digits = lambda chosen: "".join(device.id[-1] for device in chosen)
print(json.dumps({
    "devices": digits(devices),
    "visible": digits(vendor.visible(devices, os.environ)),
    "fastest": digits(vendor.fastest(devices)),
    "notes": vendor.notes,
}))
"""


def test_a_gpu_is_described_and_gpus_are_in_pci_order(on_machine: OnMachine) -> None:
    found = on_machine(DISCOVER, *_gpu(1, "NVIDIA A100-SXM4-80GB", 80, 0xAF), *_gpu(2, bus=0x3B))
    assert [(device["id"][-1], device["index"]) for device in found["devices"]] == [("2", 1), ("1", 0)]
    described = Device(
        kind="cuda",
        id=f"GPU-{_uuid(1)}",
        index=0,
        name="NVIDIA A100-SXM4-80GB",
        memory=80 * GIB,
        memory_free=40 * GIB,
        capability=(8, 0),
        pci="ff00:af:00.0",
        speed=6912 * 1410.0,
    )
    assert found["devices"][1] == json.loads(json.dumps(asdict(described)))
    assert found["notes"] == []


def test_a_machine_without_gpus_or_driver_has_none_and_loads_the_bindings_only_for_a_driver(
    on_machine: OnMachine,
) -> None:
    code = f"{DISCOVER.replace('print', 'str')}\nimport sys\n"
    code += "print(json.dumps([vendor.discover(), vendor.notes, 'pynvml' in sys.modules]))"
    assert on_machine(code) == [[], [], True]
    assert on_machine(code, driver="none") == [[], [], False]


@pytest.mark.parametrize(
    ("fact", "notes"),
    [
        (f"init {UNKNOWN}", ["the NVIDIA driver does not answer"]),
        (f"refuse nvmlDeviceGetCount_v2 {UNKNOWN}", []),
        (f"refuse nvmlDeviceGetHandleByIndex_v2 {NO_PERMISSION}", ["GPU 0 is left out"]),
        (f"refuse nvmlDeviceGetUUID {NO_PERMISSION}", ["GPU 0 is left out"]),
    ],
)
def test_gpus_that_the_driver_does_not_show_are_left_out(on_machine: OnMachine, fact: str, notes: list[str]) -> None:
    after_the_gpu = fact.endswith(str(NO_PERMISSION))
    facts = (*_gpu(1), fact, *_gpu(2)) if after_the_gpu else (fact, *_gpu(1))
    found = on_machine(DISCOVER, *facts)
    assert [device["id"][-1] for device in found["devices"]] == ["2"] * after_the_gpu
    assert [note.split(":")[0] for note in found["notes"]] == notes


def test_values_that_the_driver_does_not_give_are_unknown(on_machine: OnMachine) -> None:
    functions = (
        "nvmlDeviceGetName",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetMaxClockInfo",
        "nvmlDeviceGetNumGpuCores",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetP2PStatus",
        "nvmlDeviceGetTopologyCommonAncestor",
    )
    linked = _gpu(1, "NVIDIA A100", 80, 1, "nvlink 1", "ancestor 1 10")
    found = on_machine(DISCOVER, *(f"refuse {name} {NOT_SUPPORTED}" for name in functions), *linked, *_gpu(2))
    unknown = Device("cuda", f"GPU-{_uuid(1)}", 0, "NVIDIA GPU")
    assert found["devices"][0] == json.loads(json.dumps(asdict(unknown)))
    assert found["notes"] == []


def test_a_prohibited_gpu_is_left_out_but_counts_in_mask_indices(on_machine: OnMachine) -> None:
    facts = (*_gpu(1), *_gpu(2, "NVIDIA A100", 80, 2, "compute 2"), *_gpu(3, "NVIDIA A100", 80, 3, "compute 3"))
    found = on_machine(ORDERS, *facts, CUDA_VISIBLE_DEVICES="2,1")
    assert found["devices"] == "13"
    assert found["visible"] == "3"
    assert found["notes"] == [
        f"NVIDIA A100 (GPU-{_uuid(2)}) is left out: its compute mode is PROHIBITED",
        f"NVIDIA A100 (GPU-{_uuid(3)}) serves one process at a time (compute mode EXCLUSIVE_PROCESS)",
    ]


def test_mig_instances_are_devices_and_their_card_is_not(on_machine: OnMachine) -> None:
    mig = (
        "refuse nvmlDeviceGetMemoryInfo 0",
        f"mig 5 MIG-{_uuid(6)} {10 * GIB} NVIDIA A100 MIG 1g.10gb",
        f"mig 0 MIG-{_uuid(5)} {20 * GIB} NVIDIA A100 MIG 2g.20gb",
    )
    found = on_machine(
        DISCOVER, *_gpu(1), *_gpu(2, "NVIDIA A100", 80, 2, *mig), *_gpu(3, "NVIDIA A100", 80, 3, "mig -1")
    )
    described = [
        (one["id"], one["parent"], one["name"], one["memory"], one["pci"], one["capability"])
        for one in found["devices"]
    ]
    card, capability = f"GPU-{_uuid(2)}", [8, 0]
    assert described[1:] == [
        (f"MIG-{_uuid(5)}", card, "NVIDIA A100 MIG 2g.20gb", 20 * GIB, "ff00:02:00.0", capability),
        (f"MIG-{_uuid(6)}", card, "NVIDIA A100 MIG 1g.10gb", 10 * GIB, "ff00:02:00.0", capability),
    ]
    assert described[0][0] == f"GPU-{_uuid(1)}"
    assert found["notes"] == [f"NVIDIA A100 (GPU-{_uuid(3)}) is left out: it is in MIG mode and has no instance"]


def test_the_numa_node_is_read_from_sysfs_by_pci_address(on_machine: OnMachine, tmp_path: Path) -> None:
    for bus, node in (("ff00:01:00.0", "1\n"), ("ff00:02:00.0", "-1\n")):
        folder = tmp_path / "sys/bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(node)
    code = f"vendor._root = pathlib.Path({str(tmp_path)!r})"
    found = on_machine(DISCOVER.replace("print", f"import pathlib\n{code}\nprint"), *_gpu(1), *_gpu(2), *_gpu(3))
    assert [device["numa"] for device in found["devices"]] == [1, None, None]


SILENT = "no device is used: only CUDA can read CUDA_VISIBLE_DEVICES='1,0', and it does not answer"


@pytest.mark.parametrize(
    ("order", "environ", "visible", "fastest", "notes"),
    [
        # GPUs that differ: only CUDA knows which index means which.
        ("213", {"CUDA_VISIBLE_DEVICES": "0,2", "FAKE_CUDA_MASKED": "23"}, "23", "213", []),
        ("213", {"CUDA_VISIBLE_DEVICES": "0,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "13", "213", []),
        ("213", {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "", "213", []),
        # An order that lacks a GPU does not rank them; their figures do.
        ("12", {}, "123", "231", []),
        # CUDA is there and shows no device, or is not there.
        ("", {"CUDA_VISIBLE_DEVICES": "1,0"}, "", "231", []),
        (None, {"CUDA_VISIBLE_DEVICES": "1,0"}, "", "231", [SILENT]),
        (None, {"CUDA_VISIBLE_DEVICES": f"GPU-{_uuid(3)},GPU-{_uuid(1)}"}, "31", "231", []),
    ],
)
def test_mask_indices_and_fastest_follow_the_order_of_cuda(
    on_machine: OnMachine, order: str | None, environ: dict[str, str], visible: str, fastest: str, notes: list[str]
) -> None:
    digits = {"FAKE_CUDA": order or "", "FAKE_CUDA_MASKED": environ.get("FAKE_CUDA_MASKED", "")}
    cuda = {name: ",".join(digit * 32 for digit in text) for name, text in digits.items() if text}
    found = on_machine(ORDERS, *MIXED_GPUS, driver="new" if order is None else "cuda", **{**environ, **cuda})
    found["notes"] = [note.partition(": OSError")[0] for note in found["notes"]]
    assert found == {"devices": "123", "visible": visible, "fastest": fastest, "notes": notes}


@pytest.mark.parametrize(
    ("ids", "seen", "same"),
    [
        ("GPU-ab GPU-cd", "AB cd", True),
        ("GPU-ab", "?", True),
        ("MIG-12", "ab", True),
        ("GPU-ab", "", False),
        ("GPU-ab GPU-cd", "cd ab", False),
        ("MIG-12", "ab cd", False),
    ],
)
def test_verification_compares_number_and_uuids(ids: str, seen: str, same: bool) -> None:
    leased = [Device("cuda", name, index, "GPU") for index, name in enumerate(ids.split())]
    with nullcontext() if same else pytest.raises(MaskError):
        Cuda(KINDS["cuda"]).compare(leased, seen.split(), {})


# A GPU is named by the last digit of its id.
LINKS = """
import json
from pytest_accel.hardware.registry import make_vendor
devices = make_vendor("cuda").discover()
print(json.dumps({device.id[-1]: [[link.peer[-1], link.via] for link in device.links] for device in devices}))
"""


_A100 = "NVIDIA A100", 80, None
_BOTH = (*_gpu(1, *_A100, "nvlink 1", "ancestor 1 10"), *_gpu(2))


@pytest.mark.parametrize(
    ("facts", "links"),
    [
        (
            (*_gpu(1, "x", 80, 9, "nvlink 2", "nvlink 2", "nvlink 1"), *_gpu(2), *_gpu(3)),
            "2: 1 nvlink; 3: 1 nvlink, 1 nvlink; 1: 2 nvlink, 3 nvlink, 3 nvlink",
        ),
        # Links by PCIe need no host bridge.
        ((*_gpu(1, *_A100, "ancestor 1 20"), *_gpu(2)), "1: 2 pcie; 2: 1 pcie"),
        ((*_gpu(1, *_A100, "ancestor 1 30"), *_gpu(2)), "1: ; 2: "),
        (_BOTH, "1: 2 nvlink, 2 pcie; 2: 1 nvlink, 1 pcie"),
        ((f"refuse nvmlDeviceGetTopologyCommonAncestor {NOT_SUPPORTED}", *_BOTH), "1: 2 nvlink; 2: 1 nvlink"),
        ((f"refuse nvmlDeviceGetP2PStatus {NOT_SUPPORTED}", *_BOTH), "1: 2 pcie; 2: 1 pcie"),
    ],
)
def test_links_between_gpus_are_found(on_machine: OnMachine, facts: tuple[str, ...], links: str) -> None:
    found = on_machine(LINKS, *facts)
    assert "; ".join(f"{gpu}: {', '.join(map(' '.join, ends))}" for gpu, ends in found.items()) == links


RUN_DEVICE_TEST = """
import json, pathlib, subprocess, sys, tempfile
import torch
test = "import pytest\\n\\n@pytest.mark.devices(kind='cuda')\\ndef test_it(): ...\\n"
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "accel", "-p", "xdist", "-p", "no:cacheprovider", folder]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
print(json.dumps(["built with" if torch.version.cuda else "built without", done.stdout]))
"""


def test_a_gpu_that_torch_cannot_use_fails_its_test_and_says_why(on_machine: OnMachine, tmp_path: Path) -> None:
    environ = {
        "PYTEST_ACCEL_LOCK_DIR": str(tmp_path / "locks"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "COLUMNS": "300",
    }
    built, output = on_machine(RUN_DEVICE_TEST, *_gpu(1), **environ)
    if built == "built with":
        why = f"the process has been given GPU-{_uuid(1)}, which torch cannot use: RuntimeError: Found no NVIDIA"
    else:
        why = (
            f"the process should see 1 cuda devices (GPU-{_uuid(1)}) but sees 0 (none); environment: CUDA_DEVICE_ORDER="
        )
        assert "; this torch was built without CUDA\n" in output
    assert f"\nthe test's process could not run the test: {why}" in output
    assert output.count(why) == 1 + output.count("short test summary info"), "reported once, and in the summary"
    assert "Traceback" not in output
    assert "1 error in" in output


def test_discovery_and_health_import_no_torch_and_start_no_cuda(on_machine: OnMachine) -> None:
    state = "['torch' in sys.modules, open('/proc/self/maps').read().count('libcuda.so')]"
    code = f"{ORDERS.replace('print', 'str')}\nimport sys\nvendor.health(devices)\nprint(json.dumps({state}))"
    assert on_machine(code, *MIXED_GPUS, driver="cuda", FAKE_CUDA=",".join(digit * 32 for digit in "123")) == [False, 0]
