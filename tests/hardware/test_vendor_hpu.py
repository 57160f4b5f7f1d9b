"""Tests of the kind `hpu` (Intel Gaudi), with fake files of its driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_accel.core.device import Device, MaskError
from pytest_accel.hardware.vendors.hpu import Hpu, modules_seen

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
    assert [(device.id, device.index) for device in four] == [
        ("0000:1a:00.0", 2), ("0000:1b:00.0", 0), ("0000:1c:00.0", 3), ("0000:1d:00.0", 1)
    ]  # fmt: skip
    pci = "0000:1a:00.0"
    assert four[0] == Device(kind="hpu", id=pci, index=2, name="Intel GAUDI2", pci=pci, single_process=True)
    assert vendor.torch_devices(four[:2]) == ("hpu:0", "hpu:1")


def test_devices_of_other_makers_and_without_module_id_or_node_are_left_out(tmp_path: Path) -> None:
    _accel(tmp_path, 0, "0x8086")
    _accel(tmp_path, 1, "0x1da3", module_id="5")
    _accel(tmp_path, 2, "0x1022")
    _accel(tmp_path, 3, "0x1da3")
    _gaudi(tmp_path, 4, 4, 0x1A)
    (tmp_path / "dev/accel/accel4").unlink()
    vendor = Hpu(tmp_path)
    assert vendor.discover() == (Device(kind="hpu", id="hpu-5", index=5, name="Intel Gaudi", single_process=True),)
    assert vendor.notes == ("accel3 is left out: its driver reports no module_id, which masks need",)


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
