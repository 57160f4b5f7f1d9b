"""The ranks share the data between them: nothing is left out, nothing is seen twice."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, DistributedSampler, Subset


@pytest.mark.distributed([1, 2, 4])
def test_sampler_covers_the_data_once(digits, world_size, gather):
    data = Subset(digits, range(1796))
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
    loader.sampler.set_epoch(3)

    mine = list(loader.sampler)
    everybody = gather(mine)

    assert len(mine) == len(data) // world_size
    assert sorted(index for indices in everybody for index in indices) == list(range(len(data)))


@pytest.mark.distributed(2)
def test_an_odd_example_is_seen_twice(digits, gather):
    """1,797 do not divide by two. The sampler then repeats one, which a metric must know."""
    everybody = gather(list(DistributedSampler(digits, shuffle=False)))

    assert [len(indices) for indices in everybody] == [899, 899]
    assert set(everybody[0]) & set(everybody[1]) == {0}
