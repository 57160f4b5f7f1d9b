"""Tests of ``--accel-order`` and of device names in options."""

from __future__ import annotations

import re

import pytest

from pytest_accel.core.device import Device, Link, Near
from pytest_accel.hardware.device_order import (
    apply_order,
    by_figures,
    by_nearness,
    by_pci,
    linked,
    parse_names,
    select,
    ties,
)
from pytest_accel.hardware.registry import make_vendor

THREE = (
    Device("sim", "sim-0", 0, "a", memory_free=10, pci="0000:03:00.0"),
    Device("sim", "sim-1", 1, "b", memory_free=30, pci="0000:01:00.0"),
    Device("sim", "sim-2", 2, "c", memory_free=None, pci="0000:02:00.0"),
)


def _ids(devices: tuple[Device, ...]) -> str:
    return "".join(device.id[-1] for device in devices)


@pytest.mark.parametrize(
    ("text", "ids"),
    [("pci", "120"), ("free", "102"), ("2", "201"), ("sim-1,2", "120"), ("fastest", "120"), ("near", "120")],
)
def test_an_order_keeps_all_devices(text: str, ids: str) -> None:
    assert _ids(apply_order(text, THREE, make_vendor("sim", "3"))) == ids


@pytest.mark.parametrize(
    ("names", "ids"), [(["sim-1"], "1"), (["2", "0"], "20"), (["SIM-2"], "2"), (["sim-0", "sim-1"], "01")]
)
def test_a_device_is_named_by_id_start_of_the_id_or_index(names: list[str], ids: str) -> None:
    assert _ids(select(names, THREE, "--accel-ids")) == ids
    assert select(["sim-1"], make_vendor("sim", "11").discover(), "--accel-ids")[0].index == 1


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["3"], "'3' names no device"),
        (["gpu-9"], "'gpu-9' names no device"),
        (["sim-"], "'sim-' names several devices"),
        (["sim-1", "1"], "'1' names sim-1 a second time"),
    ],
)
def test_an_unknown_name_lists_the_existing_devices(names: list[str], what: str) -> None:
    message = f"{what}; allowed are 0 (sim-0), 1 (sim-1), 2 (sim-2)"
    with pytest.raises(ValueError, match=f"^--accel-ids: {re.escape(message)}$"):
        select(names, THREE, "--accel-ids")
    with pytest.raises(ValueError, match=f"^--accel-order: {re.escape(message)}$"):
        apply_order(",".join(names), THREE, make_vendor("sim", "3"))


def test_empty_names_words_and_an_empty_machine_are_errors() -> None:
    for text in ("", "0,,1", "0,", "fast", "near,pci"):
        with pytest.raises(ValueError, match=f"^{text}$"):
            parse_names(text)
    with pytest.raises(ValueError, match=r"^--accel-ids: '0' names no device; allowed are no device: none is there$"):
        select(["0"], (), "--accel-ids")


def test_devices_are_ranked_by_capability_speed_memory_and_address() -> None:
    devices = (
        Device("sim", "sim-0", 0, "none", pci="5"),
        Device("sim", "sim-1", 1, "old", capability=(7, 0), speed=9.0, memory=9),
        Device("sim", "sim-2", 2, "slow", capability=(9, 0), speed=1.0, memory=9),
        Device("sim", "sim-3", 3, "small", capability=(9, 0), speed=2.0, memory=1),
        Device("sim", "sim-4", 4, "big", capability=(9, 0), speed=2.0, memory=2),
        Device("sim", "sim-5", 5, "twin", capability=(9, 0), speed=2.0, memory=2, pci="1"),
    )
    assert _ids(by_figures(devices)) == "543210"


def test_devices_without_an_address_come_last_by_index() -> None:
    devices = (Device("sim", "sim-7", 7, ""), Device("sim", "sim-3", 3, ""), Device("sim", "sim-9", 9, "", pci="9"))
    assert _ids(by_pci(devices)) == "937"


def _linked(pairs: set[tuple[int, int]], nodes: tuple[int | None, ...]) -> tuple[Device, ...]:
    both = pairs | {(b, a) for a, b in pairs}
    return tuple(
        Device("sim", f"sim-{a}", a, "", numa=node, links=tuple(Link(f"sim-{d}", "nvlink") for c, d in both if c == a))
        for a, node in enumerate(nodes)
    )


def test_linked_devices_and_then_those_of_one_numa_node_are_adjacent() -> None:
    assert _ids(by_nearness(_linked({(0, 2), (1, 3)}, (None,) * 4))) == "0213"
    assert _ids(by_nearness(_linked(set(), (0, 1, 1, 0)))) == "0312"
    assert _ids(by_nearness(_linked({(0, 1)}, (0, 1, 0, 1)))) == "0132"


def device(number: int, name: str = "A", numa: int | None = None, **links: Near) -> Device:
    """Return a device; `links` has the kind of each link by the id of the other device (``d1="nvlink"``)."""
    ends = tuple(Link(peer, via) for peer, via in links.items())
    return Device(kind="sim", id=f"d{number}", index=number, name=name, numa=numa, links=ends)


def best(devices: list[Device], near: Near | None = None) -> tuple[str, str]:
    """Return the ids of the two devices with the strongest tie."""
    one, other, _ = max(ties(devices, near), key=lambda tie: tie[2])
    return one, other


def test_equal_models_are_preferred_and_then_linked_devices_unless_all_are_equal() -> None:
    assert ties([device(0), device(1), device(2)], "nvlink") == ties([device(0)], None) == ()
    assert best([device(0, "A", d1="nvlink"), device(1, "B", d0="nvlink"), device(2, "A")]) == ("d0", "d2")
    assert best([device(0), device(1, d2="nvlink"), device(2, d1="nvlink")]) == ("d1", "d2")


def test_the_link_that_a_test_asks_for_counts_most() -> None:
    devices = [
        device(0, "A", numa=0),
        device(1, "A", numa=1, d2="nvlink"),
        device(2, "B", numa=0, d1="nvlink", d3="pcie"),
        device(3, "C", numa=1, d2="pcie"),
    ]
    assert best(devices, "nvlink") == ("d1", "d2")
    assert best(devices, "numa") == ("d0", "d2")
    assert best(devices, "pcie") == ("d2", "d3")
    assert best(devices) == ("d0", "d1")


def test_an_nvlink_counts_more_than_everything_else_together() -> None:
    near = Device("sim", "d0", 0, "A", numa=0, links=(Link("d1", "pcie"), Link("d2", "nvlink"), Link("d2", "pcie")))
    assert best([near, device(1, numa=0), device(2, numa=1)]) == ("d0", "d2")
    assert linked(near, device(2)) > linked(device(0, d2="nvlink"), device(2)) > linked(near, device(1, numa=0))
