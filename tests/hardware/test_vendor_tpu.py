"""Tests of the kind `tpu`, with fake files of its driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_accel.core.device import Device
from pytest_accel.hardware.vendors.tpu import Tpu

CHIPS, OLD_CHIPS, RUNTIME = "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "PJRT_DEVICE"


def _write_pci(root: Path, bus: int, vendor: str, device: str, group: int) -> None:
    """Write the files of a PCI device."""
    folder = root / f"sys/bus/pci/devices/0000:{bus:02x}:00.0"
    folder.mkdir(parents=True)
    for name, text in {"vendor": vendor, "device": device, "numa_node": "1"}.items():
        (folder / name).write_text(f"{text}\n")
    target = root / f"sys/kernel/iommu_groups/{group}"
    target.mkdir(parents=True)
    (folder / "iommu_group").symlink_to(target)


def _write_chips(root: Path, count: int, model: str = "0x0063") -> Path:
    """Write the files of `count` chips, of a network card by Google and of a device by Intel; return `root`.

    The IOMMU groups of the chips count down, so that their order is not the PCI order.
    """
    _write_pci(root, 0x00, "0x1ae0", "0x0042", 99)
    _write_pci(root, 0x01, "0x8086", model, 98)
    for chip in range(count):
        _write_pci(root, 0x10 + chip, "0x1ae0", model, 20 - chip)
    (root / "dev/vfio").mkdir(parents=True)
    (root / "dev/vfio/vfio").touch()
    return root


def _create_nodes(root: Path, *names: str) -> Path:
    """Create device nodes; return `root`."""
    for name in names:
        (root / "dev" / name).touch()
    return root


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a machine with eight chips."""
    return _create_nodes(_write_chips(tmp_path_factory.mktemp("tpu"), 8), *(f"vfio/{20 - chip}" for chip in range(8)))


@pytest.fixture(scope="module")
def eight(machine: Path) -> tuple[Device, ...]:
    return Tpu(machine).discover()


def test_chips_are_described_in_pci_order(eight: tuple[Device, ...]) -> None:
    assert len(eight) == 8
    pci = "0000:17:00.0"
    assert eight[7] == Device(kind="tpu", id=pci, index=7, name="TPU v5e", pci=pci, numa=1, single_process=True)


def test_a_chip_without_device_node_is_left_out(tmp_path: Path) -> None:
    _create_nodes(_write_chips(tmp_path, 4), "vfio/19", "vfio/17")
    assert [(device.id, device.index) for device in Tpu(tmp_path).discover()] == [
        ("0000:11:00.0", 0),
        ("0000:13:00.0", 1),
    ]


def test_chips_are_found_by_the_nodes_of_googles_own_driver(tmp_path: Path) -> None:
    _create_nodes(_write_chips(tmp_path, 2, "0x005e"), "accel0", "accel1")
    assert [(device.id, device.name) for device in Tpu(tmp_path).discover()] == [
        ("0000:10:00.0", "TPU v4"),
        ("0000:11:00.0", "TPU v4"),
    ]
    (tmp_path / "dev/accel0").unlink()
    assert Tpu(tmp_path).discover() == (Device(kind="tpu", id="tpu-1", index=0, name="TPU v4", single_process=True),)


def test_nodes_of_other_devices_are_no_chips(tmp_path: Path) -> None:
    assert Tpu(tmp_path).discover() == ()
    _write_chips(tmp_path, 0)
    (tmp_path / "dev/accel").mkdir()
    assert Tpu(_create_nodes(tmp_path, "accel/accel0", "vfio/99", "vfio/98", "accel0")).discover() == ()


@pytest.mark.parametrize(("count", "shape"), [(1, "1,1,1"), (2, "1,2,1"), (3, None), (4, "2,2,1")])
def test_the_mask_sets_the_shape_of_the_chosen_chips(
    machine: Path, eight: tuple[Device, ...], count: int, shape: str | None
) -> None:
    chips = ",".join(map(str, range(count)))
    one_process = None if shape is None else "1,1,1"
    assert Tpu(machine).mask(eight[:count][::-1], {CHIPS: "7"}) == {
        RUNTIME: "TPU",
        CHIPS: chips,
        OLD_CHIPS: chips,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": shape,
        "TPU_CHIPS_PER_HOST_BOUNDS": shape,
        "TPU_PROCESS_BOUNDS": one_process,
        "TPU_HOST_BOUNDS": one_process,
    }


def test_all_chips_need_no_mask_and_an_inherited_mask_is_removed(machine: Path, eight: tuple[Device, ...]) -> None:
    assert Tpu(machine).mask(eight, {"TPU_HOST_BOUNDS": "1,1,1"}) == {RUNTIME: "TPU"}
    changes = Tpu(machine).mask(eight, {CHIPS: "0", "TPU_HOST_BOUNDS": "1,1,1"})
    assert changes.pop(RUNTIME) == "TPU"
    assert set(changes) >= {CHIPS, OLD_CHIPS, "TPU_HOST_BOUNDS", "TPU_PROCESS_BOUNDS"}
    assert set(changes.values()) == {None}


def test_torch_devices_are_numbered_by_core(eight: tuple[Device, ...]) -> None:
    assert Tpu().torch_devices((eight[5], eight[2])) == ("xla:1", "xla:0")
    old = [replace(device, name="TPU v2 or v3") for device in eight[:3]]
    assert Tpu().torch_devices(old[::-1]) == ("xla:4", "xla:2", "xla:0")
    Tpu().compare(old[:1], ["xla:0", "xla:1"], {})
