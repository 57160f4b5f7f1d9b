"""Tests of vendors whose devices are numbered device nodes, and of the reading of sysfs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_accel.core.device import Device, MaskError
from pytest_accel.hardware.sysfs import numa_node, read_number
from pytest_accel.hardware.vendors.device_nodes import nodes, pci_address
from pytest_accel.hardware.vendors.npu import Npu

CARD = re.compile(r"card([0-9]+)")


def test_nodes_are_files_with_a_number(tmp_path: Path) -> None:
    for name in ("card10", "card2", "cards", "card", "card3x"):
        (tmp_path / name).touch()
    (tmp_path / "card4").mkdir()
    assert nodes(tmp_path, CARD) == {2: "card2", 10: "card10"}
    assert nodes(tmp_path / "absent", CARD) == {}


def test_a_pci_address_is_found_in_any_class(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/pci0000:00/0000:3b:00.0"
    folder.mkdir(parents=True)
    for name in ("misc/card1", "cards/card1"):
        (tmp_path / "sys/class" / name).mkdir(parents=True)
    (tmp_path / "sys/class/misc/card1/device").symlink_to(tmp_path / "sys/devices")
    assert pci_address(tmp_path, "card1") is None
    (tmp_path / "sys/class/cards/card1/device").symlink_to(folder)
    assert pci_address(tmp_path, "card1") == "0000:3b:00.0"
    assert pci_address(tmp_path, "card2") is None


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("?", None), (None, None)])
def test_the_numa_node_is_read(tmp_path: Path, text: str | None, node: int | None) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "numa_node").write_text(text)
    assert numa_node(tmp_path, "0000:3b:00.0") == node
    assert numa_node(tmp_path, None) is None


def test_hexadecimal_numbers_are_read(tmp_path: Path) -> None:
    (tmp_path / "vendor").write_text("0x1da3\n")
    assert read_number(tmp_path / "vendor") == 0x1DA3


def test_torch_numbers_devices_by_node_number() -> None:
    devices = [Device(kind="npu", id=f"npu-{n}", index=n, name="x") for n in (5, 0, 3)]
    assert Npu().torch_devices(devices) == ("npu:2", "npu:0", "npu:1")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Npu, "package", "pytest")
    assert Npu().lacking() is None
    monkeypatch.setattr(Npu, "package", "no_such_package")
    assert Npu().lacking() == "no_such_package is not installed"


def test_a_mismatch_shows_both_sides_and_the_environment() -> None:
    devices = [Device(kind="npu", id="npu-4", index=4, name="x")]
    Npu().compare(devices, ["npu:0"], {})
    message = "the process should see 1 npu devices (npu-4) but sees 2 (npu:0, npu:1); "
    message += "environment: ASCEND_RT_VISIBLE_DEVICES='0,1'; why"
    with pytest.raises(MaskError, match=f"^{re.escape(message)}$"):
        Npu().compare(devices, ["npu:0", "npu:1"], {"ASCEND_RT_VISIBLE_DEVICES": "0,1", "C": "1"}, "; why")
    with pytest.raises(MaskError, match=r"but sees 0 \(none\); environment: no mask$"):
        Npu().compare(devices, [], {"C": "1"})
