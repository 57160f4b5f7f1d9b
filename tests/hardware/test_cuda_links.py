"""Tests of the links between NVIDIA GPUs, which the driver reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

OnMachine = Callable[..., Any]

# A GPU is identified by the last digit of its id.
LINKS = """
import json
from pytest_accel.hardware.vendors.cuda import Cuda
devices = Cuda().discover()
print(json.dumps({device.id[-1]: [[link.peer[-1], link.via] for link in device.links] for device in devices}))
"""


def _gpu(digit: int, *more: str, bus: int | None = None) -> tuple[str, ...]:
    return (f"gpu GPU-{digit}", "name NVIDIA A100", f"pci ff00 {digit if bus is None else bus:x} 0", *more)


def test_nvlinks_are_found_by_the_pci_address_of_the_other_gpu(on_machine: OnMachine) -> None:
    links = on_machine(LINKS, *_gpu(1, "link 0 2", "link 1 2", bus=9), *_gpu(2), *_gpu(3, "link 4 0", "link 5 0"))
    assert links == {"1": [["3", "nvlink"]] * 2, "2": [], "3": [["1", "nvlink"]] * 2}


def test_gpus_on_an_nvswitch_are_all_linked(on_machine: OnMachine) -> None:
    links = on_machine(LINKS, *(fact for digit in (1, 2, 3) for fact in _gpu(digit, "link 0 switch")), *_gpu(4))
    assert links == {
        "1": [["2", "nvlink"], ["3", "nvlink"]],
        "2": [["1", "nvlink"], ["3", "nvlink"]],
        "3": [["1", "nvlink"], ["2", "nvlink"]],
        "4": [],
    }


@pytest.mark.parametrize(
    ("level", "linked"), [(0, True), (10, True), (20, True), (30, False), (40, False), (50, False), (None, False)]
)
def test_pcie_links_need_no_host_bridge(on_machine: OnMachine, level: int | None, linked: bool) -> None:
    ancestor = () if level is None else (f"ancestor 2 {level}",)
    links = on_machine(LINKS, *_gpu(1, *ancestor), *_gpu(2), *_gpu(3))
    assert links == {"1": [["3", "pcie"]] * linked, "2": [], "3": [["1", "pcie"]] * linked}


def test_a_pair_may_have_links_of_both_kinds(on_machine: OnMachine) -> None:
    first = _gpu(1, "link 0 1", "ancestor 1 10", "ancestor 2 20")
    assert on_machine(LINKS, *first, *_gpu(2, "link 0 0"), *_gpu(3)) == {
        "1": [["2", "nvlink"], ["2", "pcie"], ["3", "pcie"]],
        "2": [["1", "nvlink"], ["1", "pcie"]],
        "3": [["1", "pcie"]],
    }


@pytest.mark.parametrize("code", [3, 4, 999])
def test_gpus_have_no_links_if_the_driver_does_not_report_them(on_machine: OnMachine, code: int) -> None:
    linked = (*_gpu(1, "link 0 1", "ancestor 1 10"), *_gpu(2, "link 0 0"))
    assert on_machine(LINKS, f"refuse nvmlDeviceGetTopologyCommonAncestor {code}", *linked) == {
        "1": [["2", "nvlink"]],
        "2": [["1", "nvlink"]],
    }
    assert on_machine(LINKS, f"refuse nvmlDeviceGetNvLinkState {code}", *linked) == {
        "1": [["2", "pcie"]],
        "2": [["1", "pcie"]],
    }
    assert on_machine(LINKS, *linked, driver="old") == {"1": [], "2": []}


def test_the_driver_is_asked_once_about_each_pair(on_machine: OnMachine) -> None:
    code = """
import json, pynvml
from pytest_accel.hardware.vendors.cuda import Cuda
ask, asked = pynvml.nvmlDeviceGetTopologyCommonAncestor, []
def count(one, other):
    asked.append(sorted(pynvml.nvmlDeviceGetUUID(handle)[-1] for handle in (one, other)))
    return ask(one, other)
pynvml.nvmlDeviceGetTopologyCommonAncestor = count
Cuda().discover()
print(json.dumps(asked))
"""
    asked = on_machine(code, *(fact for digit in (1, 2, 3, 4) for fact in _gpu(digit)))
    assert sorted("".join(pair) for pair in asked) == ["12", "13", "14", "23", "24", "34"]
