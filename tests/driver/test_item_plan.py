"""Tests of the plan of a test, which is made of its marks and the resources of the session."""

from __future__ import annotations

import re

import pytest

from pytest_accel.core.device import DeviceNeed, Share
from pytest_accel.core.marks import MarkError
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.item_plan import Resources, needs_of, plan_item
from pytest_accel.settings.options import Settings
from tests.plans import TWO_NODES, devices, distributed, marks, plan, resources

QUARTER = Share(fraction=0.25)


def key(*decorators: pytest.MarkDecorator, session: str | None = "sim") -> WorldKey:
    """Return the world key of a test with `decorators` in a session with devices of the kind `session`."""
    return plan(*decorators, of=resources(session)).key


def test_the_devices_mark_leases_devices_of_any_kind() -> None:
    assert key(devices(kind="cpu")).need == DeviceNeed(1, kind="cpu")
    assert key(devices(kind="cuda"), session=None).kind == "cuda"
    assert key(devices(1), session=None).kind == "none"


@pytest.mark.parametrize(
    ("session", "mark", "kind", "leased"),
    [
        ("sim", distributed(4), "sim", 4),
        ("sim", distributed(4, devices_per_rank=2), "sim", 8),
        ("sim", distributed(4, kind="cpu"), "cpu", None),
        ("sim", distributed(4, kind="cuda"), "cuda", 4),
        (None, distributed(4), "cpu", None),
        (None, distributed(4, kind="cuda"), "cuda", 4),
        # `--accel cpu`: the session's devices are CPU slots, which are leased.
        ("cpu", distributed(4), "cpu", 4),
        ("cpu", distributed(4, kind="cpu"), "cpu", None),
    ],
)
def test_ranks_are_on_accelerators_if_the_session_has_any(
    session: str | None, mark: pytest.MarkDecorator, kind: str, leased: int | None
) -> None:
    found = key(mark, session=session)
    assert (found.kind, found.ranks, found.grouped) == (kind, 4, True)
    assert (found.need.count if found.need else None) == leased
    assert found.devices_per_rank == (leased or 0) // 4
    assert found.about == f"4 on {kind}"


def test_both_marks_together_describe_each_rank() -> None:
    found = key(devices(2, memory="8GiB", name="*H100*"), distributed(3, backend="gloo", visible="rank"))
    assert found.need == DeviceNeed(6, kind="sim", memory=8 * 1024**3, name="*H100*")
    assert (found.ranks, found.devices_per_rank, found.backend, found.visible) == (3, 2, "gloo", "rank")


def test_fresh_may_be_set_by_a_mark_or_the_settings() -> None:
    assert key(distributed(fresh=True)).fresh
    assert key(devices(fresh=True)).fresh
    assert plan(distributed(2), of=resources(settings=Settings(fresh=True))).key.fresh
    assert not key(distributed(2)).fresh


def test_ranks_use_a_kind_without_a_process_group_backend_only_on_request() -> None:
    def found(*decorators: pytest.MarkDecorator) -> WorldKey:
        return key(*decorators, session="mps")

    assert (found(distributed(2)).kind, found(distributed(2)).need) == ("cpu", None)
    assert found(devices(1)).kind == "mps"
    assert found(distributed(2, kind="mps")).need == DeviceNeed(2, kind="mps")
    assert found(devices(1), distributed(1)).kind == "mps"


@pytest.mark.parametrize(
    ("mark", "kind", "sets"),
    [
        (distributed(4), "sim", 4),
        (distributed(4), "cuda", 1),
        (distributed(4, backend="nccl"), "sim", 1),
        (distributed(4, backend="gloo"), "cuda", 4),
        (distributed(4, backend="cpu:gloo,cuda:gloo"), "cuda", 4),
        (distributed(4, backend="cpu:gloo,cuda:nccl"), "cuda", 1),
        (distributed(4, init=False), "cuda", 4),
    ],
)
def test_ranks_share_a_device_if_their_backend_allows_it(mark: pytest.MarkDecorator, kind: str, sets: int) -> None:
    shared = DeviceNeed(4, kind=kind, share=QUARTER, sets=sets)
    assert key(devices(share=0.25), mark, session=kind).need == shared
    assert plan(mark, of=resources(kind, settings=Settings(share="0.25"))).key.need == shared
    without_share = key(mark, session=kind).need
    assert without_share is not None
    assert without_share.sets == 1


def test_the_share_of_the_mark_overrides_that_of_the_session() -> None:
    session = resources(settings=Settings(share="0.5"))
    assert plan(devices(share=0.25), of=session).key.need == DeviceNeed(1, share=QUARTER)
    assert plan(devices(), of=session).key.need == DeviceNeed(1, share=Share(fraction=0.5))


def test_arguments_reach_the_key_and_the_need() -> None:
    mark = distributed(4, nodes=1, backend="gloo", init=False, visible="rank", env={"A": "1"}, launcher="mpirun")
    assert key(mark) == WorldKey(
        "sim",
        DeviceNeed(4, kind="sim"),
        4,
        grouped=True,
        backend="gloo",
        init=False,
        devices_per_rank=1,
        visible="rank",
        env=(("A", "1"),),
        launcher="mpirun",
    )
    filters = devices(2, kind="cuda", memory=5, capability="9.0", name="*H100*", share=0.25, near="nvlink")
    assert key(filters).need == DeviceNeed(
        2, kind="cuda", memory=5, capability=(9, 0), name="*H100*", share=QUARTER, near="nvlink"
    )


def test_a_fake_group_is_a_world_of_one_process_on_the_cpu() -> None:
    found = plan(distributed(4096, backend="fake", kind="cpu", nodes=1, init=False, env={"A": "1"}))
    assert found.key == WorldKey(
        "cpu", None, 1, grouped=True, backend="fake", init=False, env=(("A", "1"),), fake_size=4096
    )
    assert (found.key.ranks, found.key.group_size, found.missing) == (1, 4096, None)
    needs = needs_of(found, resources())
    assert (needs.world_size, needs.devices, needs.backend, needs.fits) == (1, 0, (), True)
    assert key(distributed(4, backend="cpu:fake,cuda:fake")).fake_size == 4
    assert key(distributed(4, backend="cpu:gloo,cuda:fake")).fake_size is None


@pytest.mark.parametrize(
    ("decorators", "text"),
    [
        *(
            ((distributed(8, backend="fake", **{argument: value}),), f"{argument} must be {only!r}, got {value!r}")
            for argument, value, only in (
                *(("nodes", 2, 1), ("kind", "cuda", "cpu"), ("devices_per_rank", 2, 1)),
                *(("visible", "rank", "world"), ("launcher", "mpirun", None)),
            )
        ),
        ((distributed("all", backend="fake"),), "world_size must be an int, got 'all'"),
        ((devices(1, kind="cpu"), distributed(8, backend="fake")), "the test must not have the mark devices, too"),
    ],
)
def test_arguments_that_need_several_processes_do_not_fit_a_fake_group(
    decorators: tuple[pytest.MarkDecorator, ...], text: str
) -> None:
    with pytest.raises(MarkError, match=re.escape(f"backend='fake'): {text}. A fake process group ")):
        plan(*decorators)


def test_hypothetical_devices_match_every_filter() -> None:
    mark = devices(1, memory="80GiB", name="*H100*")
    assert plan(mark, of=resources(hypothetical=True)) == plan(devices(1))
    assert plan(mark).missing is not None


@pytest.mark.parametrize(
    ("decorators", "of", "text"),
    [
        ((devices(9),), resources(), "needs 9 sim devices; there are 8: 8 x pretended"),
        ((devices(8),), resources(), None),
        ((devices(1),), resources(None), "needs 1 device; there is no accelerator in this session"),
        ((distributed(9),), resources(), "needs 9 sim devices; there are 8: 8 x pretended"),
        ((distributed(9, kind="cpu"),), resources(), None),
        ((distributed(9, nodes=2),), resources(), "needs 2 machines; a session without a launcher has 1"),
        ((distributed(1, launcher="mpirun"),), resources(launcher_missing="there is no mpirun"), "there is no mpirun"),
        (
            (distributed(1, launcher="mpirun"),),
            resources(layout=TWO_NODES),
            "its ranks are started by mpirun, which a session under torchrun does not do",
        ),
        (
            (distributed(4, backend="nccl"), devices(share=0.25)),
            resources(count=1),
            "needs 0.25 of each of 4 sim devices; there is 1: pretended; ranks share a device under backend='gloo' "
            "only",
        ),
        ((distributed(4, backend="gloo"), devices(share=0.25)), resources(count=1), None),
        ((distributed(5),), resources(layout=TWO_NODES), "needs 5 ranks; torchrun has started 4"),
        ((distributed(3, nodes=3),), resources(layout=TWO_NODES), "needs 3 machines; torchrun has started ranks on 2"),
        ((distributed(2),), resources(layout=TWO_NODES), None),
        ((distributed(4),), resources(count=2, layout=TWO_NODES), None),
        (
            (distributed(4),),
            resources(count=1, layout=TWO_NODES),
            "needs 2 sim devices; there is 1: pretended (on one)",
        ),
        ((distributed(4, kind="cpu"),), resources(layout=TWO_NODES), None),
        ((devices("all"),), resources(None), "needs 1 device; there is no accelerator in this session"),
        ((distributed("all", at_least=9),), resources(), "needs 9 sim devices; there are 8: 8 x pretended"),
        (
            (distributed("all", at_least=7),),
            resources(None),
            "needs at least 7 ranks, each with a CPU core; there are 6",
        ),
        (
            (distributed("all", at_least=5, kind="cpu"),),
            resources(layout=TWO_NODES),
            "needs 5 ranks; torchrun has started 4",
        ),
    ],
)
def test_the_plan_has_the_reason_why_a_test_cannot_run(
    decorators: tuple[pytest.MarkDecorator, ...], of: Resources, text: str | None
) -> None:
    assert plan(*decorators, of=of).missing == text


@pytest.mark.parametrize(
    ("decorators", "session", "backend", "text"),
    [
        ((distributed(2),), None, "gloo", None),
        ((distributed(2),), None, "nccl", "cuda or rocm devices for the backend nccl; ranks run on the CPU"),
        (
            (distributed(2),),
            "sim",
            "cpu:gloo,cuda:NCCL",
            "cuda or rocm devices for the backend nccl; ranks run on sim devices",
        ),
        ((distributed(2),), "cuda", "xccl", "xpu devices for the backend xccl; ranks run on cuda devices"),
        ((distributed(2),), "rocm", "nccl", None),
        ((distributed(2),), None, "hccl", None),
        # The test uses it by itself, or the mark contradicts itself on every machine.
        ((distributed(2, init=False),), None, "nccl", None),
        ((distributed(2, kind="cpu"),), None, "nccl", None),
        ((distributed(2), devices(kind="sim")), "sim", "nccl", None),
    ],
)
def test_a_backend_needs_devices_of_its_kinds(
    decorators: tuple[pytest.MarkDecorator, ...], session: str | None, backend: str, text: str | None
) -> None:
    found = marks(*decorators)
    assert found.distributed is not None
    listed = found._replace(distributed=distributed(backend=[backend, "mpi"]).mark.combined_with(found.distributed))
    missing = plan_item(listed, {"backend": backend}, resources(session)).missing
    assert missing == (text and f"needs {text} in this session")
    alone = found._replace(distributed=distributed(backend=backend).mark.combined_with(found.distributed))
    assert plan_item(alone, {}, resources(session)).missing == missing
