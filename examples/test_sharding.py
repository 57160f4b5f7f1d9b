"""Parameters and tensors that are spread over the ranks: FSDP2 and DTensor on a device mesh."""

from __future__ import annotations

import pytest
import torch
from torch import nn

try:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
except ImportError:
    pytest.skip("needs torch 2.6: before, fully_shard has another place and no CPU", allow_module_level=True)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def step(model, images, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


@pytest.mark.distributed(2)
def test_fully_shard_equals_training_in_one_process(digits, device, device_mesh, rank, world_size):
    if device.type == "cpu" and torch.__version__ < "2.13":
        pytest.skip("older torch may sum gradients on the CPU: github.com/pytorch/pytorch/issues/162338")

    images, labels = (tensor[:256].to(device) for tensor in digits.tensors)

    alone = make_model().to(device)
    step(alone, images, labels)

    sharded = make_model().to(device)
    mesh = device_mesh((world_size,), ("data",))
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    step(sharded, images.chunk(world_size)[rank], labels.chunk(world_size)[rank])

    for expected, found in zip(alone.parameters(), sharded.parameters(), strict=True):
        assert isinstance(found, DTensor)
        assert found.to_local().shape[0] == expected.shape[0] // world_size, "each rank keeps its part only"
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.distributed(4)
def test_a_product_of_sharded_matrices(device, device_mesh):
    mesh = device_mesh((2, 2), ("rows", "columns"))
    torch.manual_seed(0)
    left, right = torch.randn(8, 6, device=device), torch.randn(6, 4, device=device)

    product = distribute_tensor(left, mesh, [Shard(0), Shard(1)]) @ distribute_tensor(right, mesh, [Shard(1), Shard(0)])

    torch.testing.assert_close(product.full_tensor(), left @ right)
