"""Training in parallel gives the same model as training in one process, on real data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


@pytest.mark.distributed([2, 4])
def test_ddp_equals_training_in_one_process(digits, device, rank, world_size):
    images, labels = (tensor[:1792].to(device) for tensor in digits.tensors)
    batches = 3 * list(zip(images.split(64), labels.split(64), strict=True))

    alone = make_model().to(device)
    train(alone, batches)

    parallel = DistributedDataParallel(make_model().to(device))
    share = slice(rank, None, world_size)
    train(parallel, [(images[share], labels[share]) for images, labels in batches])

    for expected, found in zip(alone.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    accuracy = (parallel(images).argmax(1) == labels).float().mean()
    assert accuracy > 0.9
