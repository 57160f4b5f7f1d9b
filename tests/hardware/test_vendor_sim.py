"""Tests of the kind `sim`: simulated devices, made from a number or a TOML file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_accel.core.device import Device, Link, MaskError
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.vendors.sim import Sim, read_topology

TOPOLOGY = """
[[device]]
name = "Big"
memory = "80GiB"
capability = "9.0"
numa = 0
pci = "0000:02:00.0"
speed = 2.5
links = [{to = 1, via = "nvlink"}]

[[device]]
memory = 16_000_000_000
pci = "0000:01:00.0"

[[device]]
links = [{to = 0, via = "pcie"}, {to = 1, via = "numa"}]
"""


def _sim(argument: str | None) -> Sim:
    return Sim(KINDS["sim"], argument)


def _topology(folder: Path, text: str) -> Path:
    file = folder / "machine.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_count_makes_plain_devices() -> None:
    assert _sim("2").discover() == (Device("sim", "sim-0", 0, "sim"), Device("sim", "sim-1", 1, "sim"))
    assert _sim(None).discover() == ()


def test_a_file_describes_each_device_and_a_link_holds_in_both_directions(tmp_path: Path) -> None:
    assert read_topology(_topology(tmp_path, TOPOLOGY)) == (
        Device(
            kind="sim",
            id="sim-0",
            index=0,
            name="Big",
            memory=80 * 1024**3,
            memory_free=80 * 1024**3,
            capability=(9, 0),
            pci="0000:02:00.0",
            numa=0,
            links=(Link("sim-1", "nvlink"), Link("sim-2", "pcie")),
            speed=2.5,
        ),
        Device(
            kind="sim",
            id="sim-1",
            index=1,
            name="sim",
            memory=16_000_000_000,
            memory_free=16_000_000_000,
            pci="0000:01:00.0",
            links=(Link("sim-0", "nvlink"), Link("sim-2", "numa")),
        ),
        Device(kind="sim", id="sim-2", index=2, name="sim", links=(Link("sim-0", "pcie"), Link("sim-1", "numa"))),
    )


def test_devices_of_a_file_are_found_in_pci_order_and_ranked_by_their_properties(tmp_path: Path) -> None:
    vendor = _sim(str(_topology(tmp_path, TOPOLOGY)))
    assert [device.id for device in vendor.discover()] == ["sim-1", "sim-0", "sim-2"]
    assert [device.id for device in vendor.fastest(vendor.discover())] == ["sim-0", "sim-1", "sim-2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[device]", "Expected ']]' at the end of an array declaration (at line 1, column 9)"),
        ("", "Object missing required field `device`"),
        ("[[device]]\n[[device]]\nmem = 1", "Object contains unknown field `mem` - at `$.device[1]`"),
        ("[[device]]\nname = 3", "Expected `str`, got `int` - at `$.device[0].name`"),
        ("[[device]]\nmemory = '4G'", "memory '4G': allowed are a positive number with KiB"),
        ("[[device]]\ncapability = 9.0", "Expected `str | null`, got `float` - at `$.device[0].capability`"),
        (
            "[[device]]\n[[device]]\nlinks = [{to = 2, via = 'nvlink'}]",
            "device 1 has a link to 2: there are 2 devices",
        ),
        ("[[device]]\nlinks = [{to = 1, via = 'x'}]", "Invalid enum value 'x' - at `$.device[0].links[0].via`"),
    ],
)
def test_the_error_of_an_invalid_file_names_the_file_and_what_is_allowed(
    tmp_path: Path, text: str, message: str
) -> None:
    file = _topology(tmp_path, text)
    with pytest.raises(ValueError, match=rf"^sim topology {re.escape(str(file))}.*{re.escape(message)}"):
        _sim(str(file))


def test_a_process_is_verified_against_its_environment() -> None:
    vendor = _sim("3")
    devices = vendor.discover()
    assert vendor.mask((devices[2], devices[0]), {}) == {"SIM_VISIBLE_DEVICES": "sim-2,sim-0"}
    assert vendor.torch_devices(devices[:2]) == ("cpu", "cpu")
    vendor.verify(devices, {})
    vendor.verify(devices[1:], {"SIM_VISIBLE_DEVICES": "sim-1,sim-2"})
    vendor.verify((), {"SIM_VISIBLE_DEVICES": ""})
    with pytest.raises(MaskError):
        vendor.verify(devices, {"SIM_VISIBLE_DEVICES": "1,0,2"})
