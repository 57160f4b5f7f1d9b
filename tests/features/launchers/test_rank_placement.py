"""Tests of the layout of a session: which fork servers, on which nodes, fork the ranks of a world."""

from __future__ import annotations

import pytest

from pytest_accel.features.launchers.placement import Layout, RankMachine


def layout(*servers: tuple[int, ...]) -> Layout:
    """Return a layout of nodes with these fork servers. The driver's node is the first."""
    return Layout(tuple(RankMachine(f"node-{number}", f"10.0.0.{number}", each) for number, each in enumerate(servers)))


TWO = layout((0, 1), (2, 3))
UNEVEN = layout((0,), (1, 2, 3), (4, 5))
ROUND_ROBIN = layout((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("machines", "ranks", "nodes", "servers"),
    [
        pytest.param(TWO, 1, 1, (0,), id="one rank on the driver's node"),
        pytest.param(TWO, 2, 1, (0, 1), id="two ranks on one node"),
        pytest.param(TWO, 2, 2, (0, 2), id="one rank on each of two nodes"),
        pytest.param(TWO, 3, 1, (0, 1, 2), id="more ranks than one node has"),
        pytest.param(TWO, 4, 2, (0, 1, 2, 3), id="all ranks"),
        pytest.param(layout((0, 1, 2), (3, 4, 5)), 4, 2, (0, 1, 3, 4), id="evenly"),
        pytest.param(layout((0, 1, 2), (3,)), 4, 2, (0, 1, 2, 3), id="as evenly as there is room"),
        pytest.param(UNEVEN, 2, 1, (1, 2), id="a larger node alone"),
        pytest.param(UNEVEN, 5, 1, (1, 2, 3, 4, 5), id="two larger nodes instead of three"),
        pytest.param(UNEVEN, 3, 3, (0, 1, 4), id="one rank on each of three nodes"),
        pytest.param(ROUND_ROBIN, 4, 1, (0, 2, 1, 3), id="ranks numbered round-robin by the launcher"),
    ],
)
def test_ranks_are_distributed_evenly_over_as_few_nodes_as_possible(
    machines: Layout, ranks: int, nodes: int, servers: tuple[int, ...]
) -> None:
    seats = machines.seats(ranks, nodes)

    assert tuple(seat.server for seat in seats) == servers
    assert all(seat.server in machines.machines[seat.machine].servers for seat in seats)
    assert len({seat.machine for seat in seats}) >= nodes


@pytest.mark.parametrize(
    ("machines", "ranks", "nodes", "launcher", "text"),
    [
        (TWO, 4, 2, "mpirun", None),
        (TWO, 5, 1, "mpirun", "needs 5 ranks; mpirun has started 4"),
        (TWO, 3, 3, "mpirun", "needs 3 machines; mpirun has started ranks on 2"),
    ],
)
def test_shortage_names_missing_ranks_or_nodes(
    machines: Layout, ranks: int, nodes: int, launcher: str, text: str | None
) -> None:
    assert machines.shortage(ranks, nodes, launcher) == text
