"""Tests of the kind `rocm` (AMD), with fake files of the KFD driver."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_accel.core.device import Device, Link, MaskError
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.health import HealthVendor
from pytest_accel.hardware.vendors.rocm import Rocm

IDS = [f"GPU-{digit * 16}" for digit in "abc"]
ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def _rocm(root: Path = Path("/")) -> Rocm:
    return Rocm(KINDS["rocm"], root=root)


def _machine(root: Path, unique_ids: list[int]) -> Path:
    """Write the files of a machine with a CPU node and a GPU for each unique id; return `root`.

    The PCI buses count down, so that the order of KFD is not the PCI order. The first two GPUs have an XGMI link.
    """
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "0").mkdir(parents=True)
    (nodes / "0/gpu_id").write_text("0\n")
    for number, unique_id in enumerate(unique_ids, 1):
        node, bus = nodes / str(number), 0x40 - number
        (node / "mem_banks/0").mkdir(parents=True)
        (node / "gpu_id").write_text(f"{1000 + number}\n")
        (node / "properties").write_text(
            f"simd_count 440\nmax_engine_clk_fcompute 1700\ngfx_target_version 90010\n"
            f"location_id {bus << 8}\ndomain 0\nunique_id {unique_id}\n"
        )
        (node / "mem_banks/0/properties").write_text("heap_type 1\nsize_in_bytes 68702699520\n")
        if number < 3:
            (node / "io_links/0").mkdir(parents=True)
            (node / "io_links/0/properties").write_text(f"type 11\nnode_from {number}\nnode_to {3 - number}\n")
        pci = root / f"sys/bus/pci/devices/0000:{bus:02x}:00.0"
        pci.mkdir(parents=True)
        (pci / "numa_node").write_text("1\n")
        (pci / "mem_info_vram_total").write_text("1000\n")
        (pci / "mem_info_vram_used").write_text("400\n")
        (pci / "ras").mkdir()
        (pci / "ras/umc_err_count").write_text("ue: 0\nce: 7\nde: 0\n")
    return root


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a machine with the GPUs `IDS`."""
    return _machine(tmp_path_factory.mktemp("rocm"), [int(digit * 16, 16) for digit in "abc"])


def test_gpus_are_described_in_pci_order(machine: Path) -> None:
    vendor = _rocm(machine)
    devices = vendor.discover()
    assert [(device.id, device.index) for device in devices] == [(IDS[2], 2), (IDS[1], 1), (IDS[0], 0)]
    assert devices[2] == Device(
        kind="rocm",
        id=IDS[0],
        index=0,
        name="AMD gfx90a",
        memory=68702699520,
        memory_free=600,
        capability=(9, 0, 10),
        pci="0000:3f:00.0",
        numa=1,
        links=(Link(IDS[1], "nvlink"),),
        speed=440 * 1700.0,
    )
    assert vendor.notes == ()
    assert vendor.torch_devices(vendor.discover()[:2]) == ("cuda:0", "cuda:1")


def test_the_address_is_the_id_of_a_gpu_whose_unique_id_is_missing_or_repeated(tmp_path: Path) -> None:
    devices = _rocm(_machine(tmp_path, [0, 7, 7])).discover()
    assert {device.id for device in devices} == {"0000:3f:00.0", "GPU-0000000000000007", "0000:3d:00.0/2"}


def test_a_machine_without_kfd_has_no_gpus_and_a_broken_node_is_left_out_with_a_note(tmp_path: Path) -> None:
    assert _rocm(tmp_path).discover() == ()
    _machine(tmp_path, [1, 2])
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/1/gpu_id").write_text("?")
    vendor = _rocm(tmp_path)
    assert [device.index for device in vendor.discover()] == [0]
    assert [note.split(":")[0] for note in vendor.notes] == ["KFD node 1 is left out"]


@pytest.mark.parametrize(
    ("environ", "left"),
    [({}, [2, 1, 0]), ({ROCR: "2,0"}, [2, 0]), ({ROCR: f"{IDS[1]},0"}, [1, 0]),
     ({CUDA: "2"}, [2]), ({HIP: "", CUDA: "0"}, []), ({HIP: "-1", ROCR: "0,1"}, []), ({HIP: "1", CUDA: "0"}, [1])],
)  # fmt: skip
def test_a_single_list_of_ids_and_numbers_is_read_without_torch(
    machine: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], left: list[int]
) -> None:
    monkeypatch.setattr(sys, "executable", "absent")
    vendor = _rocm(machine)
    assert [device.index for device in vendor.visible(vendor.discover(), environ)] == left
    assert vendor.notes == ()


FAKE_TORCH = """
import os
from types import SimpleNamespace
uuids = os.environ["UUIDS"].split()
cuda = SimpleNamespace(
    device_count=lambda: len(uuids),
    get_device_properties=lambda index: SimpleNamespace(uuid=uuids[index]),
)
"""


@pytest.mark.parametrize(
    "environ", [{ROCR: "0x1"}, {ROCR: "0,9"}, {ROCR: "GPU-a"}, {HIP: "01"}, {ROCR: "2,1", HIP: "1"}]
)
def test_torch_is_asked_for_the_meaning_of_other_masks(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.syspath_prepend(tmp_path)
    vendor = _rocm(machine)
    devices = vendor.discover()
    uuids = [(digit * 16).encode().hex() for digit in "ca"]
    assert vendor.visible(devices, {**environ, "UUIDS": " ".join(uuids)}) == (devices[0], devices[2])


def test_no_device_is_used_if_torch_does_not_say_what_it_sees(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.syspath_prepend(tmp_path)
    answers: dict[str | None, dict[str, str]] = {
        None: {"UUIDS": ""},
        "does not say which devices it sees": {"UUIDS": "3"},
        "does not answer: KeyError: 'UUIDS'": {},
    }
    for why, uuids in answers.items():
        vendor = _rocm(machine)
        assert vendor.visible(vendor.discover(), {ROCR: "2,1", HIP: "1", **uuids}) == ()
        values = "HIP_VISIBLE_DEVICES='1' ROCR_VISIBLE_DEVICES='2,1'"
        note = f"no device is used: only torch can read {values}, and it {why}"
        assert vendor.notes == ((note,) if why else ())
    # Nobody is asked on a machine without such devices.
    assert _rocm(tmp_path).visible((), {ROCR: "GPU-a"}) == ()


def test_masks_are_ids_and_numbers_of_rocr_alone(machine: Path) -> None:
    devices = _rocm(machine).discover()
    assert _rocm().mask(devices[:2], {ROCR: "1", HIP: "0"}) == {ROCR: f"{IDS[2]},{IDS[1]}", HIP: None, CUDA: None}
    assert _rocm().mask([replace(devices[1], id="0000:3e:00.0")], {})[ROCR] == "1"


def test_verification_compares_count_and_ids() -> None:
    vendor, devices = _rocm(), [Device("rocm", name, index, "GPU") for index, name in enumerate(IDS)]
    vendor.compare(devices[:1], IDS[:1], {})
    vendor.compare(devices[:1], ["?"], {})
    with pytest.raises(MaskError, match=r"should see 1 rocm .* HIP_VISIBLE_DEVICES='1'"):
        vendor.compare(devices[1:2], IDS[:1], {HIP: "1"})


def test_a_faulty_gpu_is_left_out_and_keeps_its_index(tmp_path: Path) -> None:
    _machine(tmp_path, [int(digit * 16, 16) for digit in "abc"])
    (tmp_path / "sys/bus/pci/devices/0000:3f:00.0/ras/umc_err_count").write_text("ue: 2\nce: 0\n")
    vendor = _rocm(tmp_path)
    devices = vendor.discover()
    assert [(device.id, device.index) for device in devices] == [(IDS[2], 2), (IDS[1], 1)]
    why = "it has had 2 uncorrectable memory errors (ECC) since its driver was loaded"
    assert vendor.notes == (f"AMD gfx90a ({IDS[0]}) is left out: {why}",)
    assert vendor.visible(devices, {ROCR: "1"}) == (devices[1],)


def test_a_gpu_is_busy_if_processes_outside_of_the_session_use_it(tmp_path: Path) -> None:
    _machine(tmp_path, [int(digit * 16, 16) for digit in "abc"])
    for pid, gpu, used in ((os.getppid(), 1001, 2**31), (os.getpid(), 1002, 2**30), (os.getppid(), 1003, 0)):
        folder = tmp_path / f"sys/class/kfd/kfd/proc/{pid}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"vram_{gpu}").write_text(f"{used}\n")
    vendor = _rocm(tmp_path)
    assert isinstance(vendor, HealthVendor)
    health = vendor.health(vendor.discover(), os.getpid())
    assert {name: one.state for name, one in health.items()} == {IDS[0]: "busy", IDS[1]: "fine", IDS[2]: "fine"}
    assert health[IDS[0]].reason.startswith(f"is used by pid {os.getppid()} (")
    assert health[IDS[0]].reason.endswith(", 2 GiB)")
    assert health[IDS[0]].memory_free == 600


def test_links_between_gpus_are_read_from_both_folders(tmp_path: Path) -> None:
    _machine(tmp_path, [int(digit * 16, 16) for digit in "abc"])
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for one, other in ((1, 3), (3, 1), (1, 2)):
        folder = nodes / f"{one}/p2p_links/{other}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"type {2 if 3 in (one, other) else 11}\nnode_from {one}\nnode_to {other}\n")
    links = {device.id: device.links for device in _rocm(tmp_path).discover()}
    assert links[IDS[0]] == (Link(IDS[1], "nvlink"), Link(IDS[2], "pcie"))
    assert links[IDS[2]] == (Link(IDS[0], "pcie"),)
