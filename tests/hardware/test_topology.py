"""Tests of the topology: which devices are close to each other."""

from __future__ import annotations

from pytest_accel.core.device import Device, Link, Near
from pytest_accel.hardware.topology import linked, ties


def device(number: int, name: str = "A", numa: int | None = None, **links: Near) -> Device:
    """Return a device; `links` has the kind of each link by the id of the other device (``d1="nvlink"``)."""
    ends = tuple(Link(peer, via) for peer, via in links.items())
    return Device(kind="sim", id=f"d{number}", index=number, name=name, numa=numa, links=ends)


def best(devices: list[Device], near: Near | None = None) -> tuple[str, str]:
    """Return the ids of the two devices with the strongest tie."""
    one, other, _ = max(ties(devices, near), key=lambda tie: tie[2])
    return one, other


def test_equal_pairs_have_no_ties() -> None:
    assert ties([device(0), device(1), device(2)], None) == ()
    assert ties([device(0), device(1)], "nvlink") == ()
    assert ties([device(0)], None) == ()


def test_nvlinks_count_more_than_a_common_numa_node() -> None:
    assert linked(device(0, d1="nvlink"), device(1)) > linked(device(0, numa=0, d1="pcie"), device(1, numa=0))
    assert linked(device(0, numa=0), device(1, numa=0)) > linked(device(0, numa=0), device(1, numa=1))
    assert linked(device(0), device(1)) == 0


def test_devices_of_one_model_are_preferred_to_linked_devices() -> None:
    devices = [device(0, "A", d1="nvlink"), device(1, "B", d0="nvlink"), device(2, "A")]
    assert best(devices) == ("d0", "d2")


def test_linked_devices_of_one_model_are_preferred() -> None:
    devices = [device(0), device(1, d2="nvlink"), device(2, d1="nvlink")]
    assert best(devices) == ("d1", "d2")


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
