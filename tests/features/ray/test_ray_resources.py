"""Tests of the placement group bundles that Ray is asked for to run a world."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_accel.core.device import DeviceNeed, Share
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.ray.ray_resources import TYPE_LABEL, Bundles, RayNode, choose_bundles, demand_of
from pytest_accel.pool.starter import PlaceError


def devices_key(
    ranks: int = 1,
    *,
    kind: str = "cuda",
    per_rank: int = 1,
    nodes: int = 1,
    share: Share | None = None,
    together: bool = True,
    name: str | None = None,
    grouped: bool = True,
) -> WorldKey:
    sets = ranks if share is not None and together else 1
    need = DeviceNeed(ranks * per_rank, kind, share=share, sets=sets, name=name)
    return WorldKey(kind, need, ranks, grouped, devices_per_rank=per_rank, machines=nodes)


def node(name: str, amount: float, resource: str = "GPU", **labels: str) -> RayNode:
    return RayNode(name, name, "", {"CPU": 4.0, resource: amount}, labels)


def bundles_for(key: WorldKey, *nodes: RayNode, models: tuple[str, ...] = ()) -> Bundles:
    return choose_bundles(demand_of(key), nodes, models)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        pytest.param(devices_key(4), "4 GPU on one node", id="ranks"),
        pytest.param(devices_key(grouped=False, per_rank=3), "3 GPU on one node", id="process"),
        pytest.param(devices_key(2, per_rank=2), "4 GPU on one node", id="per_rank"),
        pytest.param(devices_key(3, nodes=2), "2 and 1 GPU on 2 nodes", id="nodes"),
        pytest.param(devices_key(4, nodes=2), "2 GPU on each of 2 nodes", id="even"),
        pytest.param(devices_key(kind="tpu"), "1 TPU on one node", id="tpu"),
        pytest.param(devices_key(2, kind="neuron"), "2 neuron_cores on one node", id="neuron"),
        pytest.param(WorldKey("cpu", None, 5, True, machines=2), "3 and 2 CPU on 2 nodes", id="cpu"),
        pytest.param(devices_key(share=Share(fraction=0.25)), "0.25 GPU on one node", id="share"),
        pytest.param(devices_key(3, share=Share(fraction=1 / 3)), "1 GPU on one node", id="thirds"),
        pytest.param(devices_key(2, share=Share(fraction=1 / 3)), "0.6667 GPU on one node", id="rounded-up"),
        pytest.param(devices_key(5, share=Share(fraction=0.5)), "3 GPU on one node", id="several-shared"),
        pytest.param(devices_key(4, per_rank=2, share=Share(fraction=0.5)), "4 GPU on one node", id="shared-pairs"),
        pytest.param(devices_key(2, share=Share(fraction=0.5), together=False), "2 GPU on one node", id="apart"),
        pytest.param(devices_key(kind="hpu", share=Share(fraction=0.5)), "1 HPU on one node", id="indivisible"),
        pytest.param(devices_key(share=Share(bytes=10**9)), "1 GPU on one node", id="bytes"),
    ],
)
def test_the_needs_of_a_world_become_bundles(key: WorldKey, expected: str) -> None:
    assert bundles_for(key).text == expected


def test_a_world_is_divided_only_if_no_node_is_large_enough() -> None:
    nodes = [node("a", 4), node("b", 2), node("c", 2)]
    assert bundles_for(devices_key(4), *nodes).ranks == (4,)
    assert bundles_for(devices_key(5), *nodes).ranks == (3, 2)
    assert bundles_for(devices_key(7), *nodes).ranks == (3, 2, 2)
    assert bundles_for(devices_key(4, nodes=2), *nodes).ranks == (2, 2)
    # One process cannot be divided.
    assert bundles_for(devices_key(grouped=False, per_rank=5), *nodes).ranks == (1,)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (devices_key(16), "needs 16 GPU on one node; the largest node of the Ray cluster (a) has 4"),
        (devices_key(8, nodes=2), "needs 4 GPU on each of 2 nodes; the Ray cluster has 1 such node"),
        (devices_key(4, nodes=4), "needs 1 GPU on each of 4 nodes; the Ray cluster has 3 such nodes"),
        (devices_key(kind="hpu"), "needs 1 HPU on one node; no node of the Ray cluster has HPU"),
    ],
)
def test_shortage_says_what_the_cluster_has(key: WorldKey, expected: str) -> None:
    nodes = [node("b", 2), node("a", 4), node("c", 2)]
    bundles = bundles_for(key, *nodes)
    assert not bundles.fits(nodes)
    assert bundles.shortage(nodes) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("*H100*", ("H100",)),
        ("NVIDIA H100 80GB HBM3", ("H100",)),
        ("*", ("A100", "H100", "H200")),
        ("*A1000*", ()),
        ("*H?00*", ("H100", "H200")),
    ],
)
def test_a_name_selects_models(name: str, expected: tuple[str, ...]) -> None:
    nodes = [node("a", 4, **{TYPE_LABEL: "A100"}), node("b", 4, **{TYPE_LABEL: "H100"}), node("c", 1, "CPU")]
    assert bundles_for(devices_key(name=name), *nodes, models=("H200",)).models == expected


def test_avoided_nodes_are_not_used() -> None:
    nodes = [node("a", 4), node("b", 2)]
    demand = demand_of(devices_key(2))
    assert choose_bundles(replace(demand, avoided=frozenset("a")), nodes).usable(nodes) == [nodes[1]]
    none = choose_bundles(replace(demand, avoided=frozenset("ab")), nodes)
    assert not none.fits(nodes)
    assert none.shortage(nodes) == "needs 2 GPU on one node; no other node of the Ray cluster has GPU"


def test_a_name_selects_no_model_if_a_node_does_not_report_its_model() -> None:
    assert bundles_for(devices_key(name="*H100*"), node("a", 4), models=("H100",)).models == ()


def test_bundles_fit_only_on_nodes_of_their_models() -> None:
    nodes = [node("a", 4, **{TYPE_LABEL: "A100"}), node("b", 1, **{TYPE_LABEL: "H100"})]
    bundles = bundles_for(devices_key(2, name="*H100*"), *nodes)
    assert not bundles.fits(nodes)
    assert bundles.shortage(nodes) == "needs 2 GPU (H100) on one node; the largest node of the Ray cluster (b) has 1"


def test_kinds_that_ray_does_not_know_are_refused() -> None:
    with pytest.raises(PlaceError, match="Ray does not assign devices of kind 'mlu'; it assigns cuda, rocm"):
        demand_of(devices_key(kind="mlu"))
