"""Tests of the kind `hpu` (Intel Gaudi), with fake files of its driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.device import Device, MaskError, Vendor
from pytest_accel.hardware.vendors.hpu import Hpu, modules_seen, read_modules

MODULES, MODULE = "HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"


def _accel(root: Path, number: int, vendor: str, **attributes: str) -> None:
    """Write the files of an accelerator of the PCI vendor `vendor`."""
    folder = root / f"sys/class/accel/accel{number}/device"
    folder.mkdir(parents=True)
    (root / "dev/accel").mkdir(parents=True, exist_ok=True)
    for node in (f"accel{number}", f"accel_controlD{number}"):
        (root / "dev/accel" / node).touch()
    for name, text in {"vendor": vendor, **attributes}.items():
        (folder / name).write_text(f"{text}\n")


def _gaudi(root: Path, number: int, module: int, bus: int) -> None:
    address = f"0000:{bus:02X}:00.0"
    _accel(root, number, "0x1da3", module_id=str(module), pci_addr=address, device_type="GAUDI2")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Device, ...]:
    """Provide four devices whose order by address is not that of their module numbers."""
    root = tmp_path_factory.mktemp("hpu")
    for number, module in enumerate((2, 0, 3, 1)):
        _gaudi(root, number, module, 0x1A + number)
    return Hpu(root).discover()


def test_gaudis_have_the_pci_address_as_id_and_the_module_as_index(four: tuple[Device, ...], tmp_path: Path) -> None:
    vendor = Hpu()
    assert isinstance(vendor, Vendor)
    assert (vendor.kind, vendor.hardware, vendor.backend) == ("hpu", True, "hccl")
    assert [(device.id, device.index) for device in four] == [
        ("0000:1a:00.0", 2), ("0000:1b:00.0", 0), ("0000:1c:00.0", 3), ("0000:1d:00.0", 1)
    ]  # fmt: skip
    pci = "0000:1a:00.0"
    assert four[0] == Device(kind="hpu", id=pci, index=2, name="Intel GAUDI2", pci=pci, single_process=True)
    assert vendor.torch_devices(four[:2]) == ("hpu:0", "hpu:1")


def test_devices_of_other_makers_and_without_module_id_are_left_out(tmp_path: Path) -> None:
    _accel(tmp_path, 0, "0x8086")
    _accel(tmp_path, 1, "0x1da3", module_id="5")
    _accel(tmp_path, 2, "0x1022")
    _accel(tmp_path, 3, "0x1da3")
    vendor = Hpu(tmp_path)
    assert vendor.discover() == (Device(kind="hpu", id="hpu-5", index=5, name="Intel Gaudi", single_process=True),)
    assert vendor.notes == ("accel3 is left out: its driver reports no module_id, which masks need",)


def test_a_gaudi_without_device_node_is_left_out(tmp_path: Path) -> None:
    _gaudi(tmp_path, 0, 0, 0x1A)
    (tmp_path / "dev/accel/accel0").unlink()
    assert Hpu(tmp_path).discover() == Hpu(tmp_path / "nothing").discover() == ()


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        ({}, [2, 0, 3, 1]),
        ({MODULES: "3,0"}, [3, 0]),
        ({MODULES: " 3 ,+1"}, [3, 1]),
        ({MODULES: "1,7,0,1"}, [1, 0]),
        ({MODULES: "0,x"}, []),
        ({MODULES: ""}, []),
        ({MODULES: "all"}, []),
        ({MODULES: "-1"}, []),
        ({MODULE: "3"}, [3]),
        ({MODULES: "1,2", MODULE: "2"}, [2]),
        ({MODULES: "1,2", MODULE: "0"}, []),
        ({MODULES: "1" * 9999}, []),
    ],
)
def test_masks_select_devices(four: tuple[Device, ...], environ: dict[str, str], left: list[int]) -> None:
    assert [device.index for device in Hpu().visible(four, environ)] == left


@given(st.text() | st.text("0123456789,-+_ x"), st.none() | st.text("0123456789,-"))
def test_any_mask_text_gives_distinct_devices(four: tuple[Device, ...], modules: str, module: str | None) -> None:
    numbers = read_modules(modules)
    assert len(set(numbers)) == len(numbers)
    left = Hpu().visible(four, {MODULES: modules} | ({} if module is None else {MODULE: module}))
    assert len(set(left)) == len(left)
    assert set(left) <= set(four)


@given(st.data())
def test_a_written_mask_shows_the_chosen_devices(four: tuple[Device, ...], data: st.DataObject) -> None:
    chosen = tuple(data.draw(st.permutations(four)))[: data.draw(st.integers(0, 4))]
    inherited = data.draw(st.dictionaries(st.sampled_from((MODULES, MODULE)), st.sampled_from(("1", "2"))))
    changes = Hpu().mask(chosen, inherited)
    assert set(changes) == {MODULES, MODULE}
    after = {name: value for name, value in changes.items() if value is not None}
    assert Hpu().visible(four, after) == chosen
    Hpu().compare(chosen, modules_seen(after, 4, len(chosen)), after)


def test_the_mask_of_one_device_also_sets_its_module_id(four: tuple[Device, ...]) -> None:
    assert Hpu().mask(four[2:3], {}) == {MODULES: "3", MODULE: "3"}
    assert Hpu().mask(four[:2], {MODULE: "3"}) == {MODULES: "2,0", MODULE: None}


def test_verification_compares_modules_and_count(four: tuple[Device, ...]) -> None:
    def check(devices: tuple[Device, ...], count: int, environ: dict[str, str]) -> None:
        Hpu().compare(devices, modules_seen(environ, count, len(devices)), environ)

    with pytest.raises(MaskError, match=r"2 hpu devices .* sees 1 \(module 2\); .*_MODULES='2,0'"):
        check(four[:2], 1, {MODULES: "2,0"})
    with pytest.raises(MaskError, match=r"2 hpu devices .* sees 2 \(module 0, module 2\)"):
        check(four[:2], 8, {MODULES: "0,2"})
    with pytest.raises(MaskError, match=r"1 hpu devices .* sees 0 \(none\); environment: no mask"):
        check(four[:1], 8, {})
    with pytest.raises(MaskError, match=r"1 hpu devices .* sees 2 \(module 2, module 0\)"):
        check(four[:1], 1, {MODULES: "2,0"})
