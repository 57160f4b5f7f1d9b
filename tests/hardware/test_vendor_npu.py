"""Tests of the kind `npu` (Ascend), with fake device nodes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.device import Device, Vendor
from pytest_accel.hardware.vendors.npu import Npu

MASK = "ASCEND_RT_VISIBLE_DEVICES"


def _machine(root: Path, numbers: list[int]) -> Path:
    """Create the control nodes, and the device nodes with `numbers`; return `root`."""
    (root / "dev").mkdir()
    for name in ("davinci_manager", "devmm_svm", "hisi_hdc", *(f"davinci{number}" for number in numbers)):
        (root / "dev" / name).touch()
    return root


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Device, ...]:
    return Npu(_machine(tmp_path_factory.mktemp("npu"), [0, 1, 2, 3])).discover()


def test_each_device_node_is_a_device(four: tuple[Device, ...]) -> None:
    vendor = Npu()
    assert isinstance(vendor, Vendor)
    assert (vendor.kind, vendor.hardware, vendor.backend) == ("npu", True, "hccl")
    assert four == tuple(Device(kind="npu", id=f"npu-{n}", index=n, name="Ascend NPU") for n in range(4))


def test_indices_count_only_nodes_that_the_container_has(tmp_path: Path) -> None:
    devices = Npu(_machine(tmp_path, [10, 6])).discover()
    assert [(device.id, device.index) for device in devices] == [("npu-6", 0), ("npu-10", 1)]


def test_a_pci_address_is_the_id_only_if_it_is_unique(tmp_path: Path) -> None:
    _machine(tmp_path, [0, 1, 2])
    for number, address in enumerate(("0000:c1:00.0", "0000:81:00.0", "0000:81:00.0")):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text("2\n")
        entry = tmp_path / f"sys/class/devdrv/davinci{number}"
        entry.mkdir(parents=True)
        (entry / "device").symlink_to(folder)
    devices = Npu(tmp_path).discover()
    assert [(device.id, device.index, device.numa) for device in devices] == [
        ("npu-1", 1, 2),
        ("npu-2", 2, 2),
        ("0000:c1:00.0", 0, 2),
    ]
    vendor = Npu(tmp_path)
    assert vendor.mask(devices, {}) == {MASK: "0,1,2"}
    assert vendor.torch_devices(devices) == ("npu:1", "npu:2", "npu:0")


def test_without_device_nodes_there_are_no_devices(tmp_path: Path) -> None:
    assert Npu(tmp_path).discover() == Npu(_machine(tmp_path, [])).discover() == ()


@pytest.mark.parametrize(
    ("text", "left"),
    [("1,2,3", [1, 2, 3]), ("1, 2,3", [1]), ("1,2,-1,3", [1, 2]), ("3,2,1", [1, 2, 3]), ("0,0,1", [0, 1]), ("", []),
     ("-1", []), (",1", []), ("all", []), ("1,9", [1]), ("0x1", [0]), ("1" * 9999, []), ("٣", [])],
)  # fmt: skip
def test_masks_select_devices(four: tuple[Device, ...], text: str, left: list[int]) -> None:
    assert [device.index for device in Npu().visible(four, {MASK: text})] == left


def test_without_a_mask_all_devices_are_visible(four: tuple[Device, ...]) -> None:
    assert Npu().visible(four, {"CUDA_VISIBLE_DEVICES": ""}) == four


@given(st.text() | st.text("0123456789,- x"))
def test_any_mask_text_gives_distinct_devices(four: tuple[Device, ...], text: str) -> None:
    numbers = Npu().read(text)
    assert sorted(set(numbers)) == numbers
    left = Npu().visible(four, {MASK: text})
    assert len(set(left)) == len(left)
    assert set(left) <= set(four)


@given(st.data())
def test_a_written_mask_shows_the_chosen_devices(four: tuple[Device, ...], data: st.DataObject) -> None:
    chosen = tuple(data.draw(st.permutations(four)))[: data.draw(st.integers(0, 4))]
    vendor = pickle.loads(pickle.dumps(Npu()))
    mask = vendor.mask(chosen, {MASK: data.draw(st.sampled_from(("", "2", "0,1")))})
    seen = vendor.visible(four, mask)
    assert set(seen) == set(chosen)
    names = vendor.torch_devices(chosen)
    assert [f"npu:{seen.index(device)}" for device in chosen] == list(names)
