"""Tests of `RayMachine`: the devices of a Ray cluster with which a session plans. They do not need Ray."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.marks import Marks
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import Resources, plan_item
from pytest_accel.features.order.scheduler import RunOrder
from pytest_accel.features.order.tasks import Task, need_of
from pytest_accel.features.ray import ray_resources
from pytest_accel.features.ray.ray_resources import TYPE_LABEL, RayMachine, RayNode
from pytest_accel.features.sizes.hooks import pytest_accel_plan_all
from pytest_accel.hardware.inventory import Machine, describe, parse_kind
from pytest_accel.hardware.vendors.base_vendor import BaseVendor
from pytest_accel.settings.options import Settings

NODES = (
    RayNode("0", "head", "10.0.0.1", {"CPU": 8.0}, {}),
    RayNode("1", "one", "10.0.0.2", {"CPU": 8.0, "GPU": 4.0}, {TYPE_LABEL: "A100"}),
    RayNode("2", "two", "10.0.0.3", {"CPU": 8.0, "GPU": 2.0}, {TYPE_LABEL: "H100"}),
)


def machine(accel: str, nodes: Sequence[RayNode] = NODES, *, can_scale: bool = False) -> RayMachine:
    spec = parse_kind(accel)
    return RayMachine(spec, nodes, Machine(spec), can_scale=can_scale)


def key(count: int, kind: str = "sim", nodes: int = 1) -> WorldKey:
    return WorldKey(kind, DeviceNeed(count, kind), count, True, devices_per_rank=1, machines=nodes)


def resources(machine: RayMachine) -> Resources:
    return Resources(machine, Settings(), lambda launcher: None, lambda node, kind: "not asked", pytest_accel_plan_all)


def test_all_nodes_are_one_machine() -> None:
    found = pickle.loads(pickle.dumps(machine("sim:4")))  # Sent to xdist workers.
    assert describe(found.session) == "accel: sim, 6 devices: 4 x A100, 2 x H100; on 3 nodes of a Ray cluster"
    assert [device.id for device in found.session.devices] == [f"one/{n}" for n in range(4)] + ["two/0", "two/1"]
    assert found.of("sim") is found.session
    assert found.of("cuda").devices == ()
    assert found.of("cpu").kind == "cpu"


def test_all_ranks_fit_on_the_nodes_when_distributed_evenly() -> None:
    def number(marks: Marks) -> int:
        key = plan_item(marks, {}, resources(machine("sim:4"))).key
        assert key.need is not None
        return key.need.count

    assert number(Marks(distributed=pytest.mark.distributed("all").mark)) == 5
    assert number(Marks(distributed=pytest.mark.distributed("all", nodes=2).mark)) == 5
    assert number(Marks(devices=pytest.mark.devices("all").mark)) == 4


@pytest.mark.parametrize(
    ("world_key", "text"),
    [
        (key(4), None),
        (key(2, nodes=2), None),
        # Ranks are distributed evenly, and three do not fit on the smaller node.
        (key(6), "needs 6 GPU on one node; the largest node of the Ray cluster (one) has 4"),
        (key(1, "mlu"), "Ray does not assign devices of kind 'mlu'"),
    ],
)
def test_shortage_says_why_a_world_fits_no_node(world_key: WorldKey, text: str | None) -> None:
    found = machine("sim:4").shortage(world_key)
    if text is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(text)


def test_named_resources_are_those_of_this_machine() -> None:
    spec = parse_kind("sim:4")
    found = pickle.loads(
        pickle.dumps(RayMachine(spec, NODES, Machine(spec, resources={"license": 2}), can_scale=False))
    )
    assert [device.id for device in found.of("license").devices] == ["license-0", "license-1"]
    shortage = found.shortage(key(1, "license"))
    assert shortage is not None
    assert shortage.startswith("Ray does not assign devices of kind 'license'; it assigns ")


def test_a_cluster_with_an_autoscaler_may_get_larger_nodes() -> None:
    assert machine("sim:4", can_scale=True).shortage(key(9)) is None


def test_an_autoscaler_may_add_the_first_devices() -> None:
    found = machine("sim:4", NODES[:1], can_scale=True)
    assert describe(found.session) == (
        "accel: sim, no devices; on 1 node of a Ray cluster, whose autoscaler may add some "
        "(asked for by name: ranks do not run on the CPU)"
    )
    assert found.session_kind == "sim"
    assert found.shortage(key(1)) is None
    unnamed = machine("auto", NODES[:1], can_scale=True)
    assert "(name their kind with --accel to have its autoscaler add some)" in describe(unnamed.session)
    assert unnamed.session_kind is None


def test_a_cluster_without_devices_has_a_kind_if_it_is_asked_for_by_name() -> None:
    assert machine("sim:4", NODES[:1]).session_kind == "sim"
    unnamed = machine("auto", NODES[:1])
    assert unnamed.session_kind is None
    assert unnamed.shortage(WorldKey("none", DeviceNeed(1), 1, False, devices_per_rank=1)) == (
        "needs 1 device; there is no accelerator in this session"
    )


@pytest.mark.parametrize("nodes", [NODES, NODES[:1]])
def test_the_schedule_has_a_worker_wait_for_devices_that_an_autoscaler_may_add(
    request: pytest.FixtureRequest, nodes: Sequence[RayNode]
) -> None:
    growing = machine("sim:4", nodes, can_scale=True)
    plan = plan_item(Marks(distributed=pytest.mark.distributed(9).mark), {}, resources(growing))
    order = RunOrder([Task("test_it.py::test_large", need_of(request.node, plan, growing))], 1)
    order.idle.append("gw0")
    assert list(order.started()) == [("gw0", 0)]


def test_tests_of_a_cluster_that_has_no_devices_yet_start_at_once(request: pytest.FixtureRequest) -> None:
    """The autoscaler must learn what all of them need; the second would otherwise wait for the end of the first."""
    growing = machine("sim:4", NODES[:1], can_scale=True)
    plans = [
        plan_item(Marks(distributed=pytest.mark.distributed(size).mark), {}, resources(growing)) for size in (2, 4)
    ]
    tasks = [
        Task(f"test_it.py::test_{number}", need_of(request.node, plan, growing)) for number, plan in enumerate(plans)
    ]
    order = RunOrder(tasks, 2)
    order.idle += ["gw0", "gw1"]
    assert sorted(index for _, index in order.started()) == [0, 1]


def test_kinds_that_torch_cannot_use_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseVendor, "lacking", lambda vendor: f"torch is not built for {vendor.kind}")
    text = describe(machine("auto").session)
    assert text.startswith(
        "accel: no node of the Ray cluster has an accelerator for this session; "
        "GPU cannot be cuda devices, since torch is not built for cuda"
    )
    monkeypatch.setattr(BaseVendor, "lacking", lambda vendor: None)
    assert machine("auto").session.kind == "cuda"


def test_kinds_that_ray_does_not_assign_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_resources, "kinds", lambda: ("broken", "cuda"))
    monkeypatch.setattr(BaseVendor, "lacking", lambda vendor: None)
    assert machine("auto").session.kind == "cuda"
