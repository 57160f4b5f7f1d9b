"""Data parallel training under whatever has launched it: torchrun, accelerate, deepspeed, mpirun or srun."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def number(*names: str, default: int) -> int:
    """The first of the environment variables that is there: each launcher has names of its own."""
    return next((int(os.environ[name]) for name in names if name in os.environ), default)


def digits() -> TensorDataset:
    """1,024 pictures of 8 x 8 pixels, each a noisy copy of one of ten."""
    made = torch.Generator().manual_seed(0)
    pictures = torch.randn(10, 64, generator=made)
    labels = torch.randint(10, (1024,), generator=made)
    return TensorDataset(pictures[labels] + 0.5 * torch.randn(1024, 64, generator=made), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--local_rank", type=int, help="given by deepspeed, which sets LOCAL_RANK too")
    options = parser.parse_args()

    rank = number("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", default=0)
    size = number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", default=1)
    local = number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", default=0)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, local)
        torch.accelerator.set_device_index(local)
    dist.init_process_group(dist.get_default_backend_for_device(device), rank=rank, world_size=size)
    train(rank, size, device, options.epochs)
    # This ends the group's threads, since nothing refers to the group: the model is gone, and torch.distributed.nn was
    # imported before the group existed. DDP imports it, too, and its functions keep the group that exists then.
    # A thread that still runs when Python exits may abort the process.
    dist.destroy_process_group()


def train(rank: int, size: int, device: torch.device, epochs: int) -> None:
    """Train the model, which refers to the process group until this function returns."""
    data = digits()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for pictures, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pictures.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")

    pictures, labels = (tensor.to(device) for tensor in data.tensors)
    accuracy = (model(pictures).argmax(1) == labels).float().mean().item()
    weights = sum(parameter.sum().item() for parameter in model.parameters())
    print(f"rank {rank} of {size}: accuracy {accuracy:.3f}, weights {weights:.5f}")


if __name__ == "__main__":
    main()
