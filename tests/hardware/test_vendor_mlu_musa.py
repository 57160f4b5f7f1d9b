"""Tests of the kinds `mlu` (Cambricon) and `musa` (Moore Threads), which differ only in names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.device import Device, Vendor
from pytest_accel.hardware.vendors.device_nodes import NumberedVendor
from pytest_accel.hardware.vendors.mlu import Mlu
from pytest_accel.hardware.vendors.musa import Musa

BOTH = pytest.mark.parametrize("vendor_type", [Mlu, Musa])
NODE_NAMES = {"mlu": "cambricon_dev{}", "musa": "mtgpu.{}"}


def _machine(root: Path, kind: str, numbers: list[int]) -> Path:
    """Create the control nodes of both kinds, and the device nodes of `kind` with `numbers`; return `root`."""
    (root / "dev").mkdir()
    for name in ("cambricon_ctl", "mtgpu", "mtgpuctl", *(NODE_NAMES[kind].format(number) for number in numbers)):
        (root / "dev" / name).touch()
    return root


def _four_devices(kind: str) -> tuple[Device, ...]:
    return tuple(Device(kind=kind, id=f"{kind}-{n}", index=n, name="x") for n in range(4))


@pytest.mark.parametrize(
    ("vendor_type", "name", "backend", "mask"),
    [
        (Mlu, "Cambricon MLU", "cncl", "MLU_VISIBLE_DEVICES"),
        (Musa, "Moore Threads GPU", "mccl", "MUSA_VISIBLE_DEVICES"),
    ],
)
def test_each_device_node_is_a_device(
    tmp_path: Path, vendor_type: type[NumberedVendor], name: str, backend: str, mask: str
) -> None:
    vendor = vendor_type(_machine(tmp_path, vendor_type.kind, [3, 11]))
    assert isinstance(vendor, Vendor)
    assert (vendor.hardware, vendor.backend, vendor.mask_variables) == (True, backend, (mask,))
    assert vendor.discover() == (
        Device(kind=vendor_type.kind, id=f"{vendor_type.kind}-3", index=0, name=name),
        Device(kind=vendor_type.kind, id=f"{vendor_type.kind}-11", index=1, name=name),
    )
    assert vendor_type(tmp_path / "nothing").discover() == ()
    assert vendor.torch_devices(vendor.discover()) == (f"{vendor_type.kind}:0", f"{vendor_type.kind}:1")


def test_moore_threads_nodes_may_have_names_without_a_dot(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("mtgpu0", "mtgpu1"):
        (tmp_path / "dev" / name).touch()
    assert [device.id for device in Musa(tmp_path).discover()] == ["musa-0", "musa-1"]


@BOTH
@pytest.mark.parametrize(
    ("text", "left"),
    [("2,0", [2, 0]), (" 1 , 3", [1, 3]), ("1,1,0", [1, 0]), ("0,9,1", [0]), ("1,x,0", [1]), ("", []), ("-1", []),
     ("NoDevFiles", []), ("1" * 9999, [])],
)  # fmt: skip
def test_masks_select_devices(vendor_type: type[NumberedVendor], text: str, left: list[int]) -> None:
    devices = _four_devices(vendor_type.kind)
    assert [device.index for device in vendor_type().visible(devices, {vendor_type.mask_variables[0]: text})] == left
    assert vendor_type().visible(devices, {"CUDA_VISIBLE_DEVICES": text}) == devices


@BOTH
@given(text=st.text() | st.text("0123456789,- x"))
def test_any_mask_text_gives_distinct_devices(vendor_type: type[NumberedVendor], text: str) -> None:
    left = vendor_type().visible(_four_devices(vendor_type.kind), {vendor_type.mask_variables[0]: text})
    assert len(set(left)) == len(left)
    assert set(left) <= set(_four_devices(vendor_type.kind))


@BOTH
@given(data=st.data())
def test_a_written_mask_shows_the_chosen_devices(vendor_type: type[NumberedVendor], data: st.DataObject) -> None:
    four = _four_devices(vendor_type.kind)
    chosen = tuple(data.draw(st.permutations(four)))[: data.draw(st.integers(0, 4))]
    mask = vendor_type().mask(chosen, {vendor_type.mask_variables[0]: "3"})
    seen = vendor_type().visible(four, {name: value for name, value in mask.items() if value is not None})
    assert set(seen) == set(chosen)
    assert [seen[int(name.partition(":")[2])] for name in vendor_type().torch_devices(chosen)] == list(chosen)
