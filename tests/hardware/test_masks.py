"""Tests of masks: the devices that a mask leaves, written masks, and the distribution of devices to workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.device import Device
from pytest_accel.hardware.masks import is_index_mask, read_cuda_mask, read_list, rotate, write_mask


def _gpu(name: str, index: int = 0, parent: str | None = None) -> Device:
    return Device(kind="cuda", id=name, index=index, name="GPU", parent=parent)


FOUR = tuple(_gpu(f"GPU-{name}", index) for index, name in enumerate(("1111", "2222", "2233", "4444")))
SLICED = (_gpu("GPU-1111"), _gpu("MIG-aa", 1, "GPU-2222"), _gpu("MIG-ab", 1, "GPU-2222"), _gpu("GPU-3333", 2))


MASKS = [
    (None, "1111,2222,2233,4444"),
    ("", ""),
    (" 2 , 0 ", "2233,1111"),
    ("0,2,-1,1", "1111,2233"),
    ("-1", ""),
    ("1,9,0", "2222"),
    ("0,0", ""),
    ("1gpu2", "2222"),
    ("+1", "2222"),
    ("-0", "1111"),
    ("0x2", "1111"),
    ("-" + "0" * 30, "1111"),
    ("0,-" + "0" * 30 + "1,1", "1111"),
    (f"1,{10**20},{10**20 + 1}", "2222"),
    (f"1,{10**20},{10**20}", ""),
    ("0,", "1111"),
    (",0", ""),
    ("GPU-4,GPU-1", "4444,1111"),
    ("GPU-22", ""),
    ("GPU-1,GPU-22,GPU-4", "1111"),
    ("GPU-1,GPU-1111", ""),
    ("GPU-1,GPU-9,GPU-4", "1111"),
    ("GPU-1, GPU-4", "1111"),
    ("gpu-1111", ""),
    ("1,GPU-2222", "2222"),
    ("GPU-2222,1", "2222"),
    ("all", ""),
    ("NoDevFiles", ""),
]
"""Masks, and the devices of `FOUR` that they leave for CUDA and for torch."""


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        *MASKS,
        # torch raises ValueError for these, and reads digits that are not ASCII, which CUDA, in C, does not.
        ("+", ""),
        ("0" * 5000 + "2", "2233"),
        ("0," + "9" * 5000, "1111"),
        ("²", ""),
    ],
)
def test_a_cuda_mask_selects_devices(text: str | None, seen: str) -> None:
    assert write_mask(read_cuda_mask(text, FOUR)).replace("GPU-", "") == seen


READ_WITH_TORCH = """
import json, os
import torch.cuda

def read(text):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if text is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = text
    found = torch.cuda._parse_visible_devices()
    if found and isinstance(found[0], str):
        found = torch.cuda._transform_uuid_to_ordinals(found, ["GPU-1111", "GPU-2222", "GPU-2233", "GPU-4444"])
    left = next((at for at, number in enumerate(found) if number > 3), len(found))
    assert torch.cuda._device_count_nvml() == left
    return found[:left]

print(json.dumps([read(text) for text in json.loads(TEXTS)]))
"""


def test_masks_are_read_as_torch_reads_them(on_machine: Callable[..., Any]) -> None:
    code = READ_WITH_TORCH.replace("TEXTS", repr(json.dumps([text for text, _ in MASKS])))
    found = on_machine(code, *(f"gpu {device.id}" for device in FOUR))
    names = ["1111", "2222", "2233", "4444"]
    assert [(text, ",".join(names[n] for n in left)) for (text, _), left in zip(MASKS, found, strict=True)] == MASKS


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, "GPU-1111,MIG-aa,MIG-ab,GPU-3333"),
        ("MIG-ab", "MIG-ab"),
        ("MIG-ab,MIG-aa", "MIG-ab,MIG-aa"),
        ("MIG-a", ""),
        ("MIG-aa,MIG-aa", ""),
        ("MIG-aa,GPU-1111", "MIG-aa"),
        ("GPU-1111,MIG-aa", "GPU-1111"),
        ("2,1", "GPU-3333,MIG-aa,MIG-ab"),
        ("GPU-2", "MIG-aa,MIG-ab"),
        ("MIG-zz", ""),
    ],
)
def test_a_card_in_mig_mode_stands_for_its_instances(text: str | None, seen: str) -> None:
    assert write_mask(read_cuda_mask(text, SLICED)) == seen


def test_indices_count_the_cards_as_cuda_does() -> None:
    cards = ["GPU-4444", "GPU-hidden", "GPU-1111"]
    assert write_mask(read_cuda_mask("0,1,2", FOUR, cards)) == "GPU-4444,GPU-1111"
    assert read_cuda_mask("3", FOUR, cards) == ()


@pytest.mark.parametrize(
    ("text", "indices"),
    [("0", True), ("1gpu", True), ("-1", False), ("", False), ("GPU-1111", False), ("MIG-1", False), ("all", False)],
)
def test_a_mask_of_indices_is_recognized(text: str, indices: bool) -> None:
    assert is_index_mask(text) is indices


@given(st.lists(st.sampled_from(FOUR), unique=True))
def test_a_written_mask_is_read_as_the_same_devices(devices: list[Device]) -> None:
    assert read_cuda_mask(write_mask(devices), FOUR) == tuple(devices)
    assert read_list(write_mask(devices), FOUR) == tuple(devices)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", ""),
        ("-1", ""),
        ("sim-2,0", "sim-2,sim-0"),
        ("0,sim-0", "sim-0"),
        ("1,9,0", "sim-1,sim-0"),
        ("sim-2, 0", None),
        ("1,sim-9,0", None),
        ("01", None),
        ("-2", None),
    ],
)
def test_a_list_of_ids_and_numbers_selects_devices(text: str, seen: str | None) -> None:
    devices = [Device(kind="sim", id=f"sim-{index}", index=index, name="sim") for index in range(3)]
    left = read_list(text, devices)
    assert (None if left is None else write_mask(left)) == seen


@given(st.integers(0, 20), st.integers(0, 4))
def test_rotation_gives_each_worker_all_devices_with_a_different_first_one(worker: int, count: int) -> None:
    devices = FOUR[:count]
    rotated = rotate(devices, worker)
    assert sorted(rotated, key=lambda device: device.id) == list(devices)
    assert rotated[:1] == (devices[worker % count :][:1] if count else ())
