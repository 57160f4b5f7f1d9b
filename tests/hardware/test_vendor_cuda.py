"""Tests of the kind `cuda`, with a fake NVIDIA driver."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core.device import Device, MaskError, Vendor
from pytest_accel.hardware.vendors.cuda import Cuda

OnMachine = Callable[..., Any]

NO_PERMISSION, NOT_SUPPORTED, DRIVER_NOT_LOADED, UNKNOWN = 4, 3, 9, 999
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
from pytest_accel.hardware.vendors.cuda import Cuda
vendor = Cuda()
print(json.dumps({"devices": [dataclasses.asdict(device) for device in vendor.discover()], "notes": vendor.notes}))
"""

# Prints each device as the digit that its UUID repeats.
ORDERS = """
import json, os
from pytest_accel.hardware.vendors.cuda import Cuda
vendor = Cuda()
devices = vendor.discover()
digits = lambda chosen: "".join(device.id[-1] for device in chosen)
print(json.dumps({
    "devices": digits(devices),
    "visible": digits(vendor.visible(devices, os.environ)),
    "fastest": digits(vendor.fastest(devices)),
    "notes": vendor.notes,
}))
"""


def test_cuda_is_a_vendor_of_hardware() -> None:
    vendor = Cuda()
    assert isinstance(vendor, Vendor)
    assert vendor.hardware


def test_a_gpu_is_described(on_machine: OnMachine) -> None:
    found = on_machine(DISCOVER, *_gpu(1, "NVIDIA A100-SXM4-80GB", 80, 0x3B))
    assert found == {
        "devices": [
            {
                "kind": "cuda",
                "id": f"GPU-{_uuid(1)}",
                "index": 0,
                "name": "NVIDIA A100-SXM4-80GB",
                "memory": 80 * GIB,
                "memory_free": 40 * GIB,
                "capability": [8, 0],
                "pci": "ff00:3b:00.0",
                "numa": None,
                "links": [],
                "parent": None,
                "cores": [],
                "single_process": False,
                "speed": 6912 * 1410.0,
            }
        ],
        "notes": [],
    }


def test_gpus_are_found_in_pci_order(on_machine: OnMachine) -> None:
    found = on_machine(DISCOVER, *_gpu(1, bus=0xAF), *_gpu(2, bus=0x3B))
    assert [(device["id"][-1], device["index"]) for device in found["devices"]] == [("2", 1), ("1", 0)]


def test_a_machine_without_gpus_or_driver_has_none(on_machine: OnMachine) -> None:
    assert on_machine(DISCOVER) == {"devices": [], "notes": []}
    assert on_machine(DISCOVER, driver="none") == {"devices": [], "notes": []}


def test_the_bindings_are_imported_only_if_there_is_a_driver(on_machine: OnMachine) -> None:
    code = f"{DISCOVER.replace('print', 'str')}\nimport sys\nprint(json.dumps('pynvml' in sys.modules))"
    assert on_machine(code, driver="none") is False
    assert on_machine(code) is True


@pytest.mark.parametrize("code", [DRIVER_NOT_LOADED, UNKNOWN])
def test_a_driver_that_does_not_start_is_reported_in_a_note(on_machine: OnMachine, code: int) -> None:
    found = on_machine(DISCOVER, f"init {code}", *_gpu(1))
    assert found["devices"] == []
    assert [note.split(":")[0] for note in found["notes"]] == ["the NVIDIA driver does not answer"]


@pytest.mark.parametrize("code", [NO_PERMISSION, NOT_SUPPORTED, UNKNOWN])
def test_values_that_the_driver_does_not_give_are_unknown(on_machine: OnMachine, code: int) -> None:
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
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetTopologyCommonAncestor",
    )
    linked = _gpu(1, "NVIDIA A100", 80, 1, "link 0 1", "ancestor 1 10")
    found = on_machine(DISCOVER, *(f"refuse {name} {code}" for name in functions), *linked, *_gpu(2))
    device, _ = found["devices"]
    assert device["name"] == "NVIDIA GPU"
    unknown = ("memory", "memory_free", "capability", "pci", "numa", "speed", "parent")
    assert [device[name] for name in unknown] == [None] * len(unknown)
    assert device["links"] == []
    assert found["notes"] == []


def test_values_from_functions_that_an_old_driver_lacks_are_unknown(on_machine: OnMachine) -> None:
    (device,) = on_machine(DISCOVER, *_gpu(1), driver="old")["devices"]
    assert (device["memory"], device["speed"], device["links"]) == (80 * GIB, None, [])


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"])
def test_a_gpu_without_permission_is_left_out_with_a_note(on_machine: OnMachine, function: str) -> None:
    found = on_machine(DISCOVER, *_gpu(1), *_gpu(2), f"refuse {function} {NO_PERMISSION}", *_gpu(3))
    assert [device["id"][-1] for device in found["devices"]] == ["1", "3"]
    assert [note.split(":")[0] for note in found["notes"]] == ["GPU 1 is left out"]


def test_no_gpu_is_found_if_the_driver_cannot_count_them(on_machine: OnMachine) -> None:
    assert on_machine(DISCOVER, f"refuse nvmlDeviceGetCount_v2 {UNKNOWN}", *_gpu(1))["devices"] == []


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
    code = DISCOVER.replace("Cuda()", f"Cuda(root=Path({str(tmp_path)!r}))")
    found = on_machine(f"from pathlib import Path\n{code}", *_gpu(1), *_gpu(2), *_gpu(3))
    assert [device["numa"] for device in found["devices"]] == [1, None, None]


def _cuda_order(*digits: int) -> str:
    """Return the value of FAKE_CUDA that makes the fake libcuda count the GPUs in the order `digits`."""
    return ",".join(str(digit) * 32 for digit in digits)


def test_mask_indices_and_fastest_follow_the_order_of_the_cuda_driver(on_machine: OnMachine) -> None:
    found = on_machine(ORDERS, *MIXED_GPUS, driver="cuda", FAKE_CUDA=_cuda_order(2, 1, 3), CUDA_VISIBLE_DEVICES="0,2")
    assert found == {"devices": "123", "visible": "23", "fastest": "213", "notes": []}


def test_mask_indices_follow_pci_order_if_cuda_device_order_says_so(on_machine: OnMachine) -> None:
    found = on_machine(
        ORDERS,
        *MIXED_GPUS,
        driver="cuda",
        FAKE_CUDA=_cuda_order(2, 1, 3),
        CUDA_VISIBLE_DEVICES="0,2",
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
    )
    assert found["visible"] == "13"


def test_without_libcuda_properties_rank_gpus_and_mask_indices_follow_pci_order_with_a_note(
    on_machine: OnMachine,
) -> None:
    found = on_machine(ORDERS, *MIXED_GPUS, CUDA_VISIBLE_DEVICES="1,0")
    assert found["visible"] == "21"
    assert found["fastest"] == "231"
    assert found["notes"] == ["CUDA_VISIBLE_DEVICES=1,0 was read in PCI order, because CUDA's order is unknown"]


def test_a_libcuda_that_fails_to_start_is_treated_as_missing(on_machine: OnMachine) -> None:
    found = on_machine(ORDERS, *MIXED_GPUS, driver="cuda", CUDA_VISIBLE_DEVICES="1,0")
    assert (found["visible"], found["fastest"], len(found["notes"])) == ("21", "231", 1)


def test_a_driver_order_that_lacks_a_device_does_not_rank_gpus(on_machine: OnMachine) -> None:
    found = on_machine(ORDERS, *MIXED_GPUS, driver="cuda", FAKE_CUDA=_cuda_order(1, 2))
    assert found["fastest"] == "231"


def test_uuids_in_a_mask_need_no_driver_order(on_machine: OnMachine) -> None:
    mask = f"GPU-{_uuid(3)},GPU-{_uuid(1)[:4]}"
    assert on_machine(ORDERS, *MIXED_GPUS, CUDA_VISIBLE_DEVICES=mask) == {
        "devices": "123",
        "visible": "31",
        "fastest": "231",
        "notes": [],
    }


def test_a_mask_index_of_a_mig_instance_means_all_instances_of_its_card(on_machine: OnMachine) -> None:
    mig = (f"mig 0 MIG-{_uuid(5)} {GIB} x", f"mig 1 MIG-{_uuid(6)} {GIB} x")
    facts = (*_gpu(1, "NVIDIA T4", 15), *_gpu(2, "NVIDIA A100", 80, 2, *mig))
    found = on_machine(ORDERS, *facts, driver="cuda", FAKE_CUDA=_cuda_order(5, 1), CUDA_VISIBLE_DEVICES="0")
    assert (found["devices"], found["visible"]) == ("156", "56")


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b")])
def test_the_driver_order_is_read_once_and_only_if_gpus_differ(names: tuple[str, str]) -> None:
    calls: list[bool] = []

    def order() -> tuple[str, ...]:
        calls.append(True)
        return ("2", "1")

    devices = tuple(Device("cuda", f"GPU-{n}", n, name) for n, name in enumerate(names, 1))
    vendor = Cuda(driver_order=order)
    differ = len(set(names)) == 2
    for _ in range(2):
        assert vendor.fastest(devices) == (devices[::-1] if differ else devices)
        assert vendor.visible(devices, {"CUDA_VISIBLE_DEVICES": "0"}) == (devices[1:] if differ else devices[:1])
    assert calls == [True] * differ


def test_without_a_mask_all_devices_are_visible_in_pci_order() -> None:
    devices = tuple(Device("cuda", f"GPU-{n}", n, f"{n}") for n in range(2))
    assert Cuda(driver_order=lambda: ("1", "0")).visible(devices, {}) == devices


def test_a_mask_is_written_in_uuids() -> None:
    vendor = Cuda()
    devices = [Device("cuda", f"GPU-{n}", n, "x") for n in (2, 1)]
    assert vendor.mask(devices, {"CUDA_VISIBLE_DEVICES": "0,1"}) == {
        "CUDA_VISIBLE_DEVICES": "GPU-2,GPU-1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert vendor.mask([], {})["CUDA_VISIBLE_DEVICES"] == ""
    assert vendor.torch_devices(devices) == ("cuda:0", "cuda:1")


def _leased(*ids: str) -> list[Device]:
    """Return devices with `ids`, as a lease has them."""
    return [Device("cuda", name, index, "GPU") for index, name in enumerate(ids)]


@pytest.mark.parametrize(
    ("ids", "seen"),
    [
        ([], []),
        (["GPU-ab", "GPU-cd"], ["AB", "cd"]),
        (["GPU-ab"], ["GPU-ab"]),
        (["GPU-ab"], ["?"]),
        (["MIG-12"], ["ab"]),
    ],
)
def test_verification_accepts_a_process_that_sees_its_devices(ids: list[str], seen: list[str]) -> None:
    Cuda().compare(_leased(*ids), seen, {})


@pytest.mark.parametrize(
    ("ids", "seen"),
    [(["GPU-ab"], []), ([], ["ab"]), (["GPU-ab", "GPU-cd"], ["cd", "ab"]), (["MIG-12"], ["ab", "cd"])],
)
def test_verification_rejects_a_process_that_sees_other_devices(ids: list[str], seen: list[str]) -> None:
    with pytest.raises(MaskError):
        Cuda().compare(_leased(*ids), seen, {})


def test_a_mask_error_shows_expected_devices_seen_devices_and_environment() -> None:
    message = (
        "the process should see 2 cuda devices (GPU-ab, GPU-cd) but sees 1 (ab); "
        "environment: CUDA_DEVICE_ORDER='PCI_BUS_ID' CUDA_VISIBLE_DEVICES='0'"
    )
    environ = {"CUDA_VISIBLE_DEVICES": "0", "HOME": "/", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with pytest.raises(MaskError, match=f"^{re.escape(message)}$"):
        Cuda().compare(_leased("GPU-ab", "GPU-cd"), ["ab"], environ)
    message = "the process should see 0 cuda devices (none) but sees 1 (?); environment: no mask; why"
    with pytest.raises(MaskError, match=f"^{re.escape(message)}$"):
        Cuda().compare([], ["?"], {}, "; why")


RUN_DEVICE_TEST = """
import json, pathlib, subprocess, sys, tempfile
from importlib.util import find_spec
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


def test_auto_finds_the_gpus_of_the_machine(on_machine: OnMachine) -> None:
    code = """
import json
from pytest_accel.hardware.inventory import Machine, describe, parse_kind
print(json.dumps(describe(Machine(parse_kind("auto")).session)))
"""
    two = (*_gpu(1), *_gpu(2))
    assert on_machine(code, *two) == "accel: cuda, 2 devices: 2 x NVIDIA A100 (80 GiB)"
    assert (
        on_machine(code, *two, CUDA_VISIBLE_DEVICES="")
        == "accel: cuda, no devices, CUDA_VISIBLE_DEVICES= leaves none of 2"
    )
    assert on_machine(code) == "accel: no accelerator found (ranks run on the CPU)"
    assert on_machine(code, f"init {DRIVER_NOT_LOADED}") == (
        "accel: the NVIDIA driver does not answer: Driver Not Loaded (ranks run on the CPU)"
    )


def test_discovery_imports_no_torch_and_starts_no_cuda(on_machine: OnMachine) -> None:
    state = "['torch' in sys.modules, open('/proc/self/maps').read().count('libcuda.so')]"
    code = f"{ORDERS.replace('print', 'str')}\nimport sys\nprint(json.dumps({state}))"
    assert on_machine(code, *MIXED_GPUS, driver="cuda", FAKE_CUDA=_cuda_order(1, 2, 3)) == [False, 0]
