"""Two tests that do not pass, to see what is said about them."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.distributed(2)
def test_all_ranks_start_from_the_same_weights(rank, gather):
    """Fails on rank 1 only: the seed should be the same on every rank."""
    torch.manual_seed(rank)
    weight = torch.rand(1).item()
    print(f"rank {rank} starts from {weight:.4f}")
    weight_of_rank_0 = gather(weight)[0]

    assert weight == weight_of_rank_0


@pytest.mark.devices(64)
def test_on_a_whole_rack(devices):
    """A test that is skipped where there are fewer than 64 accelerators."""
    assert len(devices) == 64
