"""Tests of the comparison of a test's need with the devices of the session."""

from __future__ import annotations

import pytest

from pytest_accel.core.device import Device, DeviceNeed, Share
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.hardware.matching import candidates, shortfall

GIB = 1024**3
A100 = Device("cuda", "GPU-1", 0, "NVIDIA A100", memory=80 * GIB, capability=(8, 0))
T4 = Device("cuda", "GPU-2", 1, "NVIDIA T4", memory=15 * GIB, capability=(7, 5))
UNKNOWN = Device("cuda", "GPU-3", 2, "NVIDIA GPU")
EXCLUSIVE = Device("cuda", "GPU-4", 3, "NVIDIA L4", memory=24 * GIB, single_process=True)
SLICES = tuple(Device("cuda", f"MIG-{n}", 0, "MIG 1g", memory=10 * GIB, parent="GPU-9") for n in range(2))
HALF, GIBS = Share(fraction=0.5), Share(bytes=10 * GIB)


def _inventory(*devices: Device, hidden: int = 0) -> Inventory:
    present = len(devices) + hidden
    inherited = {"CUDA_VISIBLE_DEVICES": "0,1"} if hidden else {}
    return Inventory("cuda", devices, inherited=inherited, present=present, visible=len(devices))


@pytest.mark.parametrize(
    ("need", "ids"),
    [
        (DeviceNeed(1), "123"),
        (DeviceNeed(2, kind="cuda"), "123"),
        (DeviceNeed(1, kind="sim"), ""),
        (DeviceNeed(1, memory=15 * GIB), "12"),
        (DeviceNeed(1, memory=15 * GIB + 1), "1"),
        (DeviceNeed(1, capability=(7, 5)), "12"),
        (DeviceNeed(1, capability=(7, 6)), "1"),
        (DeviceNeed(1, name="*a100*"), "1"),
        (DeviceNeed(1, name="nvidia ?4"), "2"),
        (DeviceNeed(1, name="A100"), ""),
        (DeviceNeed(1, memory=1, name="*T4"), "2"),
    ],
)
def test_candidates_meet_every_condition_and_keep_the_order_of_the_session(need: DeviceNeed, ids: str) -> None:
    assert "".join(device.id[-1] for device in candidates(need, _inventory(A100, T4, UNKNOWN))) == ids
    assert "".join(device.id[-1] for device in candidates(need, _inventory(UNKNOWN, T4, A100))) == ids[::-1]


def test_a_slice_serves_a_need_of_one_device_only() -> None:
    inventory = _inventory(*SLICES, A100)
    assert len(candidates(DeviceNeed(1), inventory)) == 3
    assert candidates(DeviceNeed(2), inventory) == (A100,)


@pytest.mark.parametrize(
    ("need", "inventory", "text"),
    [
        (DeviceNeed(2), _inventory(A100, T4), None),
        (DeviceNeed(1), _inventory(*SLICES), None),
        (
            DeviceNeed(4, memory=40 * GIB),
            _inventory(A100, T4),
            "needs 4 cuda devices with >= 40 GiB; "
            "there are 2: NVIDIA A100 (80 GiB), NVIDIA T4 (15 GiB), 1 of them with >= 40 GiB",
        ),
        (DeviceNeed(3), _inventory(A100, A100), "needs 3 cuda devices; there are 2: 2 x NVIDIA A100 (80 GiB)"),
        (
            DeviceNeed(1, capability=(9, 0)),
            _inventory(A100, UNKNOWN),
            "needs 1 cuda device with capability >= 9.0; "
            "there are 2: NVIDIA A100 (80 GiB, 8.0), NVIDIA GPU, none with capability >= 9.0",
        ),
        (
            DeviceNeed(2, memory=15 * GIB, name="*T4*"),
            _inventory(A100, T4, UNKNOWN),
            "needs 2 cuda devices with >= 15 GiB and name *T4*; there are 3: NVIDIA A100 (80 GiB), NVIDIA T4 (15 GiB), "
            "NVIDIA GPU, 2 of them with >= 15 GiB, 1 of them with name *T4*, 1 of them with all of it",
        ),
        (
            DeviceNeed(2),
            _inventory(*SLICES),
            "needs 2 cuda devices; there are 2: 2 x MIG 1g (10 GiB), "
            "none with a whole card (a process sees one MIG instance at most)",
        ),
        (
            DeviceNeed(2),
            _inventory(T4, hidden=3),
            "needs 2 cuda devices; there is 1: NVIDIA T4 (15 GiB) (CUDA_VISIBLE_DEVICES=0,1 leaves 1 of 4)",
        ),
        (
            DeviceNeed(2),
            _inventory(hidden=4),
            "needs 2 cuda devices; there is none to use: CUDA_VISIBLE_DEVICES=0,1 leaves none of 4",
        ),
        (DeviceNeed(2), _inventory(), "needs 2 cuda devices; there is none"),
        (DeviceNeed(2), Inventory("none"), "needs 2 devices; there is no accelerator in this session"),
        (
            DeviceNeed(1, kind="sim"),
            _inventory(T4, hidden=1),
            "needs 1 sim device; there is none: --accel sim:N makes some",
        ),
        (DeviceNeed(4, share=HALF, sets=2), _inventory(T4, A100), None),
        (DeviceNeed(9, share=GIBS, sets=9), _inventory(T4, A100), None),
        (
            DeviceNeed(2, share=HALF),
            _inventory(T4),
            "needs 0.5 of each of 2 cuda devices; there is 1: NVIDIA T4 (15 GiB)",
        ),
        (
            DeviceNeed(10, share=GIBS, sets=10),
            _inventory(T4, A100),
            "needs 10 GiB of each of 10 cuda devices; there are 2: NVIDIA T4 (15 GiB), NVIDIA A100 (80 GiB)",
        ),
        (
            DeviceNeed(1, share=Share(bytes=20 * GIB)),
            _inventory(T4, UNKNOWN),
            "needs 20 GiB of 1 cuda device; there are 2: NVIDIA T4 (15 GiB), NVIDIA GPU, none with so much memory",
        ),
        (DeviceNeed(1, share=HALF), _inventory(EXCLUSIVE), None),
        (DeviceNeed(1, share=Share(bytes=20 * GIB)), _inventory(EXCLUSIVE), None),
        (
            DeviceNeed(2, share=HALF, sets=2),
            _inventory(EXCLUSIVE),
            "needs 0.5 of each of 2 cuda devices; there is 1: NVIDIA L4 (24 GiB)",
        ),
    ],
)
def test_a_shortfall_names_the_need_the_devices_and_the_reason(
    need: DeviceNeed, inventory: Inventory, text: str | None
) -> None:
    assert shortfall(need, inventory) == text
