"""MLUs, and Moore Threads' GPUs with them: the two are told apart by names alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.device import Device, Vendor
from pytest_accel.hardware.vendors.device_nodes import NumberedVendor
from pytest_accel.hardware.vendors.mlu import Mlu
from pytest_accel.hardware.vendors.musa import Musa

EACH = pytest.mark.parametrize("of", [Mlu, Musa])
NODES = {"mlu": "cambricon_dev{}", "musa": "mtgpu.{}"}


def _machine(root: Path, kind: str, numbers: list[int]) -> Path:
    (root / "dev").mkdir()
    for name in ("cambricon_ctl", "mtgpu", "mtgpuctl", *(NODES[kind].format(number) for number in numbers)):
        (root / "dev" / name).touch()
    return root


def _four(kind: str) -> tuple[Device, ...]:
    return tuple(Device(kind=kind, id=f"{kind}-{n}", index=n, name="x") for n in range(4))


@pytest.mark.parametrize(
    ("of", "name", "backend", "mask"),
    [
        (Mlu, "Cambricon MLU", "cncl", "MLU_VISIBLE_DEVICES"),
        (Musa, "Moore Threads GPU", "mccl", "MUSA_VISIBLE_DEVICES"),
    ],
)
def test_each_node_is_a_device(tmp_path: Path, of: type[NumberedVendor], name: str, backend: str, mask: str) -> None:
    vendor = of(_machine(tmp_path, of.kind, [3, 11]))
    assert isinstance(vendor, Vendor)
    assert (vendor.hardware, vendor.backend, vendor.mask_variables) == (True, backend, (mask,))
    assert vendor.discover() == (
        Device(kind=of.kind, id=f"{of.kind}-3", index=0, name=name),
        Device(kind=of.kind, id=f"{of.kind}-11", index=1, name=name),
    )
    assert of(tmp_path / "nothing").discover() == ()
    assert vendor.torch_devices(vendor.discover()) == (f"{of.kind}:0", f"{of.kind}:1")


def test_either_name_of_a_moore_threads_node_will_do(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("mtgpu0", "mtgpu1"):
        (tmp_path / "dev" / name).touch()
    assert [device.id for device in Musa(tmp_path).discover()] == ["musa-0", "musa-1"]


@EACH
@pytest.mark.parametrize(
    ("text", "left"),
    [("2,0", [2, 0]), (" 1 , 3", [1, 3]), ("1,1,0", [1, 0]), ("0,9,1", [0]), ("1,x,0", [1]), ("", []), ("-1", []),
     ("NoDevFiles", []), ("1" * 9999, [])],
)  # fmt: skip
def test_the_grammar(of: type[NumberedVendor], text: str, left: list[int]) -> None:
    devices = _four(of.kind)
    assert [device.index for device in of().visible(devices, {of.mask_variables[0]: text})] == left
    assert of().visible(devices, {"CUDA_VISIBLE_DEVICES": text}) == devices


@EACH
@given(text=st.text() | st.text("0123456789,- x"))
def test_no_mask_raises_or_names_a_device_twice(of: type[NumberedVendor], text: str) -> None:
    left = of().visible(_four(of.kind), {of.mask_variables[0]: text})
    assert len(set(left)) == len(left)
    assert set(left) <= set(_four(of.kind))


@EACH
@given(data=st.data())
def test_what_is_written_is_what_is_read(of: type[NumberedVendor], data: st.DataObject) -> None:
    four = _four(of.kind)
    chosen = tuple(data.draw(st.permutations(four)))[: data.draw(st.integers(0, 4))]
    mask = of().mask(chosen, {of.mask_variables[0]: "3"})
    seen = of().visible(four, {name: value for name, value in mask.items() if value is not None})
    assert set(seen) == set(chosen)
    assert [seen[int(name.partition(":")[2])] for name in of().torch_devices(chosen)] == list(chosen)
