"""Two tests that do not pass, to see what is said about them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist


@pytest.mark.distributed(2)
def test_all_ranks_start_from_the_same_weights(rank):
    """Fails on rank 1 only: the seed should be the same on every rank."""
    torch.manual_seed(rank)
    weights = torch.rand(3)
    print(f"seed {torch.initial_seed()}, weights {weights.tolist()}")

    weights_of_rank_0 = weights.clone()
    dist.broadcast(weights_of_rank_0, src=0)

    assert weights.tolist() == weights_of_rank_0.tolist()


@pytest.mark.devices(64)
def test_on_a_whole_rack(devices):
    """Is skipped, for want of so many accelerators."""
    assert len(devices) == 64
