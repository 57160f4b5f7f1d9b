"""A sharded operation against its unsharded reference, on examples that Hypothesis finds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st


def sharded_logsumexp(part: torch.Tensor) -> torch.Tensor:
    """Return the `logsumexp` of a vector; each rank has a part of it, which may be empty."""
    largest = part.max() if len(part) else torch.tensor(-torch.inf, device=part.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    total = (part - largest).exp().sum()
    dist.all_reduce(total)
    return largest + total.log()


@pytest.mark.distributed(2)
@given(values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20))
def test_sharded_logsumexp_equals_torchs(values, rank, world_size, device):
    whole = torch.tensor(values, device=device)
    part = whole.tensor_split(world_size)[rank]
    torch.testing.assert_close(sharded_logsumexp(part), whole.logsumexp(0))
