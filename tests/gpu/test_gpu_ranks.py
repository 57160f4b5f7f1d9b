"""Tests of ranks on a GPU: its properties as NVIDIA's tools and torch report them, process groups, and shares."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from pytest_accel.hardware.registry import make_vendor

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from pytest_accel.core.device import Device
    from pytest_accel.fixtures import Accel

pytestmark = pytest.mark.devices(kind="cuda")

MIB = 1024**2


def test_properties_are_those_that_nvidia_smi_shows(card: Device) -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs nvidia-smi")
    command = ["nvidia-smi", "--query-gpu=uuid,name,memory.total,pci.bus_id", "--format=csv,noheader,nounits"]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = [line.split(", ") for line in shown.splitlines()]
    found = make_vendor("cuda").discover()
    sliced = {device.parent for device in found}
    whole = {device.id: device for device in found if device.parent is None}
    assert card.id in whole
    assert {uuid: (device.name, device.pci) for uuid, device in whole.items()} == {
        # nvidia-smi shows PCI domains with eight digits in upper case, the kernel with four in lower case.
        uuid: (name, bus.lower()[4:])
        for uuid, name, _, bus in rows
        if uuid not in sliced
    }
    for uuid, _, memory, _ in rows:
        if uuid in whole:
            assert whole[uuid].memory == pytest.approx(int(memory) * MIB, abs=MIB)
    addresses = [str(device.pci) for device in found]
    assert addresses == sorted(addresses)


def test_cuda_0_is_the_leased_gpu(
    accel: Accel, card: Device, device: torch.device, devices: list[torch.device]
) -> None:
    import torch

    assert str(device) == "cuda:0"
    assert devices == [device]
    assert torch.cuda.device_count() == 1
    seen = torch.cuda.get_device_properties(0)
    assert f"GPU-{seen.uuid}" == card.id
    assert accel.kind == "cuda"
    assert accel.ids == (card.id,)
    assert accel.mask == {"CUDA_VISIBLE_DEVICES": card.id}
    assert seen.name == card.name
    assert (seen.major, seen.minor) == card.capability
    # NVML also counts memory that the driver itself uses.
    assert card.memory is not None
    assert 0.8 * card.memory < seen.total_memory <= card.memory


@pytest.mark.distributed(1)
def test_nccl_works_with_one_rank(card: Device, device: torch.device, process_group: ProcessGroup) -> None:
    import torch
    import torch.distributed as dist

    assert dist.get_backend(process_group) == "nccl"
    assert dist.get_world_size(process_group) == 1
    assert f"GPU-{torch.cuda.get_device_properties(device).uuid}" == card.id
    mine = torch.arange(4.0, device=device)
    dist.all_reduce(mine)
    gathered = torch.empty_like(mine)
    dist.all_gather_into_tensor(gathered, mine)
    assert gathered.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.devices(kind="cuda", share="2GiB")
def test_a_share_limits_the_memory_of_a_test(device: torch.device) -> None:
    import torch

    assert torch.ones(2**28, dtype=torch.uint8, device=device).max().item() == 1
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(2**32, dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()
