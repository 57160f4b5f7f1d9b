"""Tests of plain masks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_accel.core.device import Device
from pytest_accel.hardware.masks import read_devices, write_mask
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.hardware.vendors import cuda


def _gpu(name: str, index: int = 0, parent: str | None = None) -> Device:
    return Device(kind="cuda", id=name, index=index, name="GPU", parent=parent)


CUDA = make_vendor("cuda")
SLICED = (_gpu("GPU-1"), _gpu("MIG-a", 1, "GPU-2"), _gpu("MIG-b", 1, "GPU-2"), _gpu("GPU-3", 2))


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, "GPU-1,MIG-a,MIG-b,GPU-3"),
        ("", ""),
        ("-1", ""),
        ("GPU-3,GPU-1", "GPU-3,GPU-1"),
        ("MIG-b,MIG-a", "MIG-b,MIG-a"),
        ("2,1", "GPU-3,MIG-a,MIG-b"),
        ("GPU-2", "MIG-a,MIG-b"),
    ],
)
def test_a_plain_cuda_mask_is_read_without_cuda(monkeypatch: pytest.MonkeyPatch, text: str | None, seen: str) -> None:
    monkeypatch.delattr(cuda, "ask_driver")
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert write_mask(CUDA.visible(SLICED, environ)) == seen


@pytest.mark.parametrize(
    "text", [" 2", "0,2,-1,1", "0,0", "0,9", "1gpu", "0x2", "0,", "gpu-1", "all", "GPU-1,2", "GPU-1,MIG-a", "MIG-", "²"]
)
def test_cuda_is_asked_for_the_meaning_of_other_masks(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    asked: list[dict[str, str]] = []

    def answer(environ: Mapping[str, str]) -> tuple[str, ...]:
        asked.append(dict(environ))
        return ("b", "3", "unknown")

    monkeypatch.setattr(cuda, "ask_driver", answer)
    environ = {"CUDA_VISIBLE_DEVICES": text, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # CUDA names the instance of a card in MIG mode that a process would get.
    seen = "MIG-b,GPU-3" if text.startswith("MIG-") else "MIG-a,MIG-b,GPU-3"
    assert write_mask(CUDA.visible(SLICED, environ)) == seen
    assert asked == [environ]
    assert CUDA.visible((), environ) == ()


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", ""),
        ("-1", ""),
        ("sim-2,0", "sim-2,sim-0"),
        ("0,sim-0", None),
        ("1,1", None),
        ("1,9,0", None),
        ("sim-2, 0", None),
        ("01", None),
    ],
)
def test_a_list_of_ids_and_numbers_selects_devices(text: str, seen: str | None) -> None:
    devices = [Device(kind="sim", id=f"sim-{index}", index=index, name="sim") for index in range(3)]
    left = read_devices(text, devices)
    assert (None if left is None else write_mask(left)) == seen
