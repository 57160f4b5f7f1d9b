"""Tests of the layout of a session: on which machines the ranks of a world run."""

from __future__ import annotations

import pytest

from pytest_accel.features.launchers.machines_starter import Layout, RankMachine

ONE, OTHER, THIRD = (RankMachine(name, "") for name in ("one", "two", "three"))
TWO = Layout((ONE, OTHER), 2)
THREE = Layout((ONE, OTHER, THIRD), 2)


@pytest.mark.parametrize(
    ("layout", "ranks", "nodes", "machines"),
    [
        pytest.param(TWO, 1, 1, [0], id="one rank on the driver's machine"),
        pytest.param(TWO, 2, 1, [0, 0], id="two ranks on one machine"),
        pytest.param(TWO, 2, 2, [0, 1], id="one rank on each of two machines"),
        pytest.param(TWO, 3, 1, [0, 0, 1], id="more ranks than one machine has"),
        pytest.param(TWO, 4, 2, [0, 0, 1, 1], id="all ranks"),
        pytest.param(THREE, 4, 2, [0, 0, 1, 1], id="evenly"),
        pytest.param(THREE, 4, 3, [0, 0, 1, 2], id="on three machines"),
    ],
)
def test_ranks_are_distributed_evenly_over_as_few_machines_as_possible(
    layout: Layout, ranks: int, nodes: int, machines: list[int]
) -> None:
    assert layout.machines_of(ranks, nodes) == machines
