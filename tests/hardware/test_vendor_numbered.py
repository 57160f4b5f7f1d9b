"""Tests of the kinds whose devices are numbered device nodes, with fake nodes and fake files of sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS, KindFacts
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.hardware.sysfs import numa_node
from pytest_accel.hardware.vendors.numbered import NumberedVendor


def _machine(root: Path, *names: str) -> Path:
    """Create the nodes `names` and those of the drivers themselves; return `root`."""
    (root / "dev").mkdir()
    for name in ("davinci_manager", "hisi_hdc", "cambricon_ctl", "mtgpu", "mtgpuctl", *names):
        (root / "dev" / name).touch()
    (root / "dev/davinci5").mkdir()
    return root


@pytest.mark.parametrize(
    ("facts", "names", "title"),
    [
        (KINDS["npu"], ("davinci6", "davinci10"), "Ascend NPU"),
        (KINDS["mlu"], ("cambricon_dev6", "cambricon_dev10"), "Cambricon MLU"),
        (KINDS["musa"], ("mtgpu.6", "mtgpu.10"), "Moore Threads GPU"),
        (KINDS["musa"], ("mtgpu6", "mtgpu10"), "Moore Threads GPU"),
        # A kind like these is one row.
        (KindFacts("acme", ("ACME",), nodes="acme([0-9]+)", title="Acme"), ("acme6", "acme10"), "Acme"),
    ],
)
def test_each_node_is_a_device_and_its_position_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: KindFacts, names: tuple[str, ...], title: str
) -> None:
    monkeypatch.setitem(KINDS, facts.name, facts)
    vendor, kind = NumberedVendor(facts, _machine(tmp_path, *names)), facts.name
    assert type(make_vendor(kind)) is NumberedVendor
    assert vendor.discover() == (Device(kind, f"{kind}-6", 0, title), Device(kind, f"{kind}-10", 1, title))
    assert NumberedVendor(facts, tmp_path / "absent").discover() == ()


def test_a_pci_address_is_the_id_only_if_it_is_unique(tmp_path: Path) -> None:
    _machine(tmp_path, "davinci0", "davinci1", "davinci2", "davinci3")
    for number, address in enumerate(("0000:c1:00.0", "0000:81:00.0", "0000:81:00.0", "elsewhere")):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text("2\n")
        entry = tmp_path / f"sys/class/{'misc' if number == 1 else 'devdrv'}/davinci{number}"
        entry.mkdir(parents=True)
        (entry / "device").symlink_to(folder)
    vendor = NumberedVendor(KINDS["npu"], tmp_path)
    devices = vendor.discover()
    assert [(device.id, device.index, device.numa) for device in devices] == [
        ("npu-1", 1, 2),
        ("npu-2", 2, 2),
        ("0000:c1:00.0", 0, 2),
        ("npu-3", 3, None),
    ]
    assert vendor.mask(devices, {}) == {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}
    assert vendor.torch_devices(devices) == ("npu:1", "npu:2", "npu:0", "npu:3")


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("?", None)])
def test_the_numa_node_is_read(tmp_path: Path, text: str, node: int | None) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    assert numa_node(tmp_path, "0000:3b:00.0") is None
    (folder / "numa_node").write_text(text)
    assert numa_node(tmp_path, "0000:3b:00.0") == node
