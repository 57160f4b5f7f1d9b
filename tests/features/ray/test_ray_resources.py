"""Tests of what Ray is asked for to run a world, and of a cluster's devices for planning. They do not need Ray."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

from pytest_accel.core.device import DeviceNeed, Share
from pytest_accel.core.marks import Marks
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import Resources, plan_item
from pytest_accel.features.ray import ray_resources
from pytest_accel.features.ray.ray_resources import TYPE_LABEL, Bundles, RayMachine, RayNode, choose_bundles
from pytest_accel.hardware.inventory import Machine, describe
from pytest_accel.hardware.vendors.base_vendor import BaseVendor
from pytest_accel.settings.options import Settings


def node(name: str, amount: float, model: str | None = None) -> RayNode:
    return RayNode(name, name, "", {"CPU": 8.0, "GPU": amount}, {} if model is None else {TYPE_LABEL: model})


HEAD = RayNode("head", "head", "", {"CPU": 8.0}, {})
NODES = (HEAD, node("a", 4, model="A100"), node("b", 2, model="H100"))


def key(
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


def bundles_for(key: WorldKey, *nodes: RayNode, models: tuple[str, ...] = ()) -> Bundles:
    return choose_bundles(key, nodes, models)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        pytest.param(key(4), "4 GPU on 1 node", id="ranks"),
        pytest.param(key(grouped=False, per_rank=3), "3 GPU on 1 node", id="process"),
        pytest.param(key(2, per_rank=2), "4 GPU on 1 node", id="per_rank"),
        pytest.param(key(3, nodes=2), "2 + 1 GPU on 2 nodes", id="nodes"),
        pytest.param(key(kind="tpu"), "1 TPU on 1 node", id="tpu"),
        pytest.param(key(2, kind="neuron"), "2 neuron_cores on 1 node", id="neuron"),
        pytest.param(WorldKey("cpu", None, 5, True, machines=2), "3 + 2 CPU on 2 nodes", id="cpu"),
        pytest.param(key(share=Share(fraction=0.25)), "0.25 GPU on 1 node", id="share"),
        pytest.param(key(3, share=Share(fraction=1 / 3)), "1 GPU on 1 node", id="thirds"),
        pytest.param(key(2, share=Share(fraction=1 / 3)), "0.6667 GPU on 1 node", id="rounded-up"),
        pytest.param(key(5, share=Share(fraction=0.5)), "3 GPU on 1 node", id="several-shared"),
        pytest.param(key(4, per_rank=2, share=Share(fraction=0.5)), "4 GPU on 1 node", id="shared-pairs"),
        pytest.param(key(2, share=Share(fraction=0.5), together=False), "2 GPU on 1 node", id="apart"),
        pytest.param(key(kind="hpu", share=Share(fraction=0.5)), "1 HPU on 1 node", id="indivisible"),
        pytest.param(key(share=Share(bytes=10**9)), "1 GPU on 1 node", id="bytes"),
    ],
)
def test_the_needs_of_a_world_become_bundles(key: WorldKey, expected: str) -> None:
    assert bundles_for(key).text == expected


def test_a_world_is_divided_only_if_no_node_is_large_enough() -> None:
    nodes = [node("a", 4), node("b", 2), node("c", 2)]
    assert bundles_for(key(4), *nodes).ranks == (4,)
    assert bundles_for(key(5), *nodes).ranks == (3, 2)
    assert bundles_for(key(7), *nodes).ranks == (3, 2, 2)
    assert bundles_for(key(4, nodes=2), *nodes).ranks == (2, 2)
    # One process cannot be divided.
    assert bundles_for(key(grouped=False, per_rank=5), *nodes).ranks == (1,)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (key(4), None),
        (key(2, nodes=2), None),
        # Ranks are distributed evenly, and three do not fit on the smaller node.
        (key(6), "needs 6 GPU on 1 node; the largest nodes of the Ray cluster: a with 4"),
        (key(8, nodes=2), "needs 4 + 4 GPU on 2 nodes; the largest nodes of the Ray cluster: a with 4, b with 2"),
        (key(kind="hpu"), "needs 1 HPU on 1 node; the largest nodes of the Ray cluster: none"),
        (key(3, name="*H100*"), "needs 3 GPU (H100) on 1 node; the largest nodes of the Ray cluster: b with 2"),
    ],
)
def test_shortage_says_what_the_cluster_has(key: WorldKey, expected: str | None) -> None:
    assert choose_bundles(key, NODES).shortage(NODES) == expected


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
    assert bundles_for(key(name=name), *NODES, models=("H200",)).models == expected
    # None is selected if a node does not report its model.
    assert bundles_for(key(name=name), *NODES, node("c", 4), models=("H200",)).models == ()


def machine(
    accel: str, nodes: Sequence[RayNode] = NODES, *, can_scale: bool = False, license: int | None = None
) -> RayMachine:
    resources = {} if license is None else {"license": license}
    made = RayMachine(accel, nodes, Machine(accel, resources=resources), can_scale=can_scale)
    found = pickle.loads(pickle.dumps(made))  # Sent to xdist workers.
    assert isinstance(found, RayMachine)
    return found


def test_all_nodes_are_one_machine() -> None:
    found = machine("sim:4", license=2)
    assert describe(found.session) == "accel: sim, 6 devices: 4 x A100, 2 x H100; on 3 nodes of a Ray cluster"
    assert len({device.id for device in found.session.devices}) == 6
    assert found.of("sim") is found.session
    assert found.of("cuda").devices == ()
    # Those of this machine.
    assert found.of("cpu").kind == "cpu"
    assert [device.id for device in found.of("license").devices] == ["license-0", "license-1"]
    assert str(found.shortage(key(kind="license"))).startswith("Ray does not assign devices of kind 'license'; it ")


def test_all_ranks_fit_on_the_nodes_when_distributed_evenly() -> None:
    def number(marks: Marks) -> int:
        found = machine("sim:4")
        resources = Resources(found, Settings(), lambda one: None)
        key = plan_item(marks, {}, resources).key
        assert key.need is not None
        return key.need.count

    assert number(Marks(distributed=pytest.mark.distributed("all").mark)) == 5
    assert number(Marks(distributed=pytest.mark.distributed("all", nodes=2).mark)) == 5
    assert number(Marks(devices=pytest.mark.devices("all").mark)) == 4


def test_an_autoscaler_may_add_the_first_devices() -> None:
    found = machine("sim:4", (HEAD,), can_scale=True)
    assert describe(found.session) == (
        "accel: sim, no devices; on 1 node of a Ray cluster, whose autoscaler may add some "
        "(asked for by name: ranks do not run on the CPU)"
    )
    assert found.session_kind == "sim"
    assert found.shortage(key(9, kind="sim")) is None
    unnamed = machine("auto", (HEAD,), can_scale=True)
    assert "(name their kind with --accel to have its autoscaler add some)" in describe(unnamed.session)
    assert unnamed.session_kind is None


def test_a_cluster_without_devices_has_a_kind_if_it_is_asked_for_by_name() -> None:
    assert machine("sim:4", (HEAD,)).session_kind == "sim"
    unnamed = machine("auto", (HEAD,))
    assert unnamed.session_kind is None
    assert unnamed.shortage(WorldKey("none", DeviceNeed(1), 1, False, devices_per_rank=1)) == (
        "needs 1 device; there is no accelerator in this session"
    )


def test_with_auto_the_first_kind_that_ray_assigns_and_torch_can_use_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseVendor, "lacking", lambda vendor: f"torch is not built for {vendor.kind}")
    assert describe(machine("auto").session).startswith(
        "accel: no node of the Ray cluster has an accelerator for this session; "
        "GPU cannot be cuda devices, since torch is not built for cuda"
    )
    monkeypatch.setattr(BaseVendor, "lacking", lambda vendor: None)
    monkeypatch.setattr(ray_resources, "kinds", lambda: ("broken", "cuda"))  # Ray does not assign the first.
    assert machine("auto").session.kind == "cuda"
