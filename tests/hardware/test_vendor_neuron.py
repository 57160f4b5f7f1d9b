"""Tests of the kind `neuron` (AWS Trainium and Inferentia), with fake files of its driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_accel.core.device import Device
from pytest_accel.hardware.vendors.neuron import Neuron, write_cores

CORES, COUNT, RUNTIME = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "PJRT_DEVICE"
EIGHT = tuple(
    Device(kind="neuron", id=f"neuron-{n // 2}.{n % 2}", index=n, name="AWS Trainium1", single_process=True)
    for n in range(8)
)


def _card(root: Path, number: int, model: str, cores: int | None) -> Path:
    """Write the files of a card; return its folder in sysfs. Without `cores` there is no file with their number."""
    folder = root / f"sys/devices/virtual/neuron_device/neuron{number}"
    (folder / "info/architecture").mkdir(parents=True)
    (folder / "info/architecture/device_name").write_text(f"{model}\n")
    if cores is not None:
        (folder / "core_count").write_text(f"{cores}\n")
    (root / "dev").mkdir(exist_ok=True)
    (root / f"dev/neuron{number}").touch()
    return folder


def test_each_core_is_a_device(tmp_path: Path) -> None:
    for number in range(4):
        _card(tmp_path, number, "Trainium1", 2)
    vendor = Neuron(tmp_path, {})
    assert vendor.discover() == EIGHT
    assert vendor.notes == ()
    assert vendor.torch_devices(EIGHT[5:2:-2]) == ("xla:1", "xla:0")


@pytest.mark.parametrize(
    ("environ", "ids"),
    [
        ({}, ["neuron-0.0", "neuron-0.2"]),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, [f"neuron-0.{core}" for core in range(4)]),
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, [f"neuron-0.{core}" for core in range(4)]),
        ({"NEURON_LOGICAL_NC_CONFIG": "x"}, ["neuron-0.0", "neuron-0.2"]),
    ],
)
def test_two_cores_of_a_trainium2_are_one_device_by_default(
    tmp_path: Path, environ: dict[str, str], ids: list[str]
) -> None:
    _card(tmp_path, 0, "Trainium2", 4)
    devices = Neuron(tmp_path, environ).discover()
    assert [(device.id, device.index) for device in devices] == [(name, index) for index, name in enumerate(ids)]


def test_indices_count_only_cards_with_a_device_node(tmp_path: Path) -> None:
    for number in (2, 10, 3):
        _card(tmp_path, number, "Inferentia2", 2)
    (tmp_path / "dev/neuron3").unlink()
    assert [(device.id, device.index) for device in Neuron(tmp_path, {}).discover()] == [
        ("neuron-2.0", 0),
        ("neuron-2.1", 1),
        ("neuron-10.0", 2),
        ("neuron-10.1", 3),
    ]


def test_cores_are_counted_by_folder_if_no_file_has_their_number(tmp_path: Path) -> None:
    folder = _card(tmp_path, 0, "", None)
    vendor = Neuron(tmp_path, {})
    assert vendor.discover() == ()
    assert vendor.notes == ("neuron0 is left out: sysfs does not have its number of cores",)
    for core in range(2):
        (folder / f"neuron_core{core}").mkdir()
    assert [device.name for device in vendor.discover()] == ["AWS NeuronCore"] * 2
    assert list(vendor.notes) == []


@pytest.mark.parametrize(("cores", "text"), [([], ""), ([5], "5"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 7], "0,2-3,7")])
def test_consecutive_cores_are_written_as_a_range(cores: list[int], text: str) -> None:
    assert write_cores(cores) == text
