"""Tests of the kind `tpu`, with fake files of its driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.device import Device, MaskError, Vendor
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


def test_chips_are_described_in_pci_order(machine: Path, eight: tuple[Device, ...]) -> None:
    vendor = Tpu(machine)
    assert isinstance(vendor, Vendor)
    assert (vendor.kind, vendor.hardware, vendor.backend) == ("tpu", True, "xla")
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


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({CHIPS: "2,0"}, [2, 0]),
        ({CHIPS: "2", OLD_CHIPS: "3"}, [2]),
        ({CHIPS: "", OLD_CHIPS: "3"}, [3]),
        ({CHIPS: ""}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({CHIPS: "1,9,2"}, [1]),
        ({CHIPS: "x"}, []),
        ({CHIPS: "2", RUNTIME: "TPU"}, [2]),
        ({CHIPS: "2", RUNTIME: "CPU"}, []),
    ],
)
def test_masks_select_devices(eight: tuple[Device, ...], environ: dict[str, str], left: list[int]) -> None:
    assert [device.index for device in Tpu().visible(eight, environ)] == left


@given(st.dictionaries(st.sampled_from((CHIPS, OLD_CHIPS, RUNTIME)), st.text() | st.text("0123456789,- x")))
def test_any_mask_text_gives_distinct_devices(eight: tuple[Device, ...], environ: dict[str, str]) -> None:
    left = Tpu().visible(eight, environ)
    assert len(set(left)) == len(left)
    assert set(left) <= set(eight)


@given(st.data())
def test_a_written_mask_shows_the_chosen_devices(machine: Path, eight: tuple[Device, ...], data: st.DataObject) -> None:
    chosen = tuple(data.draw(st.permutations(eight)))[: data.draw(st.integers(0, 8))]
    inherited = data.draw(
        st.dictionaries(st.sampled_from((CHIPS, OLD_CHIPS, RUNTIME)), st.sampled_from(("", "2", "0,1", "TPU", "CPU")))
    )
    changes = Tpu(machine).mask(chosen, inherited)
    after = {name: value for name, value in {**inherited, **changes}.items() if value is not None}
    assert set(Tpu(machine).visible(eight, after)) == set(chosen)


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


def test_verification_compares_the_count(eight: tuple[Device, ...]) -> None:
    Tpu().compare(eight[:2], ["xla:0", "xla:1"], {})
    with pytest.raises(MaskError, match=r"1 tpu devices \(0000:10:00.0\) but sees 2 .* TPU_PROCESS_BOUNDS='1,1,1'"):
        Tpu().compare(eight[:1], ["xla:0", "xla:1"], {"TPU_PROCESS_BOUNDS": "1,1,1"})
