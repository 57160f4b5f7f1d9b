"""Tests of the layout of a session: on which machines the ranks of a world run."""

from __future__ import annotations

import pytest

from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.machines_starter import Layout


def layout_of(machines: int) -> Layout:
    """Return the layout of a number of machines with two processes each."""
    hellos = [Hello(rank, 1, machine=str(rank // 2)) for rank in range(2 * machines)]
    return Layout(LauncherEnv("torchrun", 0, len(hellos), 0, 2, ()), hellos)


TWO, THREE = layout_of(2), layout_of(3)


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
