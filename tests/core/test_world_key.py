from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_accel.core.device import Device, DeviceNeed, Share
from pytest_accel.core.marks import Marks
from pytest_accel.core.requirement import Requirement
from pytest_accel.core.world_key import Traits, WorldKey, key_for
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.mark_arguments import requirement

devices, distributed = pytest.mark.devices, pytest.mark.distributed


def asked(*decorators: pytest.MarkDecorator) -> Requirement:
    """What these marks ask for."""
    marks = {decorator.name: decorator.mark for decorator in decorators}
    found = requirement(Marks(marks.get("devices"), marks.get("distributed")))
    assert found is not None
    return found


def key(*decorators: pytest.MarkDecorator, session: str | None = "sim") -> WorldKey:
    return key_for(asked(*decorators), session)


def test_devices_alone_are_one_process() -> None:
    assert key(devices(2)) == WorldKey("sim", DeviceNeed(2), 1, grouped=False, devices_per_rank=2)
    assert key(devices(2)).about == "sim"


def test_devices_are_leased_whatever_their_kind() -> None:
    assert key(devices(kind="cpu")).need == DeviceNeed(1, kind="cpu")
    assert key(devices(kind="cuda"), session=None).kind == "cuda"
    assert key(devices(1), session=None).kind == "none"


@pytest.mark.parametrize(
    ("session", "mark", "kind", "leased"),
    [
        ("sim", distributed(4), "sim", 4),
        ("sim", distributed(4, devices_per_rank=2), "sim", 8),
        ("sim", distributed(4, device="cpu"), "cpu", None),
        ("sim", distributed(4, device="cuda"), "cuda", 4),
        (None, distributed(4), "cpu", None),
        (None, distributed(4, device="cuda"), "cuda", 4),
        # The session's own devices are CPU slots, which were asked for and are handed out.
        ("cpu", distributed(4), "cpu", 4),
        ("cpu", distributed(4, device="cpu"), "cpu", None),
    ],
)
def test_ranks_are_on_accelerators_where_there_are_any(
    session: str | None, mark: pytest.MarkDecorator, kind: str, leased: int | None
) -> None:
    found = key(mark, session=session)
    assert (found.kind, found.ranks, found.grouped) == (kind, 4, True)
    assert (found.need.count if found.need else None) == leased
    assert found.devices_per_rank == (leased or 0) // 4
    assert found.about == f"4 on {kind}"


def test_both_marks_describe_each_rank() -> None:
    found = key(devices(2, memory="8GiB", name="*H100*"), distributed(3, backend="gloo", visible="rank"))
    assert found.need == DeviceNeed(6, kind="sim", memory=8 * 1024**3, name="*H100*")
    assert (found.ranks, found.devices_per_rank, found.backend, found.visible) == (3, 2, "gloo", "rank")


def test_devices_of_the_cpu_are_leased_where_both_marks_ask_for_them() -> None:
    assert key(devices(1, kind="cpu"), distributed(2)).need == DeviceNeed(2, kind="cpu")


OTHERS: tuple[Callable[[], WorldKey], ...] = (
    lambda: key(distributed(3)),
    lambda: key(distributed(2), session=None),
    lambda: key(distributed(2, backend="gloo")),
    lambda: key(distributed(2, init=False)),
    lambda: key(distributed(2, devices_per_rank=2)),
    lambda: key(distributed(2, visible="rank")),
    lambda: key(distributed(2, env={"A": "1"})),
    lambda: key(distributed(2), devices(memory="8GiB")),
    lambda: key(devices(2)),
)


@pytest.mark.parametrize("other", OTHERS)
def test_tests_that_ask_for_unlike_worlds_share_none(other: Callable[[], WorldKey]) -> None:
    assert other() != key(distributed(2))
    assert other() == other()
    assert hash(other()) == hash(other())


def test_how_long_a_phase_may_take_is_no_matter_of_the_world() -> None:
    assert key(distributed(2, timeout=5)) == key(distributed(2))


def test_fresh_may_come_from_the_mark_or_the_session() -> None:
    assert key(distributed(fresh=True)).fresh
    assert key(devices(fresh=True)).fresh
    assert key_for(asked(distributed(2)), "sim", fresh=True).fresh
    assert not key(distributed(2)).fresh


def test_each_rank_of_a_world_owns_its_part_of_the_devices() -> None:
    found = key(distributed(2, devices_per_rank=2, backend="gloo", env={"A": "1"}, init=False))
    leased = tuple(Device("sim", f"sim-{number}", number, "sim") for number in range(4))
    spec = WorldSpec(7, found, "8", leased)
    assert (spec.ranks, spec.grouped, spec.share) == (2, True, None)
    assert (found.backend, found.init, found.env) == ("gloo", False, (("A", "1"),))
    assert [spec.devices_of(rank) for rank in range(2)] == [leased[:2], leased[2:]]
    assert spec.seen_by(1) == leased


def test_a_rank_that_sees_its_own_devices_only() -> None:
    leased = tuple(Device("sim", f"sim-{number}", number, "sim") for number in range(2))
    spec = WorldSpec(1, key(distributed(2, visible="rank")), None, leased)
    assert [spec.seen_by(rank) for rank in range(2)] == [leased[:1], leased[1:]]


def test_ranks_leave_a_kind_alone_whose_tensors_no_group_takes() -> None:
    def traits(kind: str) -> Traits:
        return Traits(ranks=kind != "mps")

    def found(*decorators: pytest.MarkDecorator) -> WorldKey:
        return key_for(asked(*decorators), "mps", traits)

    assert (found(distributed(2)).kind, found(distributed(2)).need) == ("cpu", None)
    assert found(devices(1)).kind == "mps"
    assert found(distributed(2, device="mps")).need == DeviceNeed(2, kind="mps")
    assert found(devices(1), distributed(1)).kind == "mps"


@pytest.mark.parametrize(
    ("mark", "default", "sets"),
    [
        (distributed(4), "gloo", 4),
        (distributed(4), None, 1),
        (distributed(4, backend="nccl"), "gloo", 1),
        (distributed(4, backend="gloo"), None, 4),
        (distributed(4, backend="cpu:gloo,cuda:gloo"), None, 4),
        (distributed(4, backend="cpu:gloo,cuda:nccl"), None, 1),
        (distributed(4, init=False), None, 4),
    ],
)
def test_ranks_may_be_on_one_device_where_their_backend_can(
    mark: pytest.MarkDecorator, default: str | None, sets: int
) -> None:
    quarter = Share(fraction=0.25)
    for shared in (
        key_for(asked(devices(share=0.25), mark), "sim", lambda kind: Traits(default)),
        key_for(asked(mark), "sim", lambda kind: Traits(default, share=quarter)),
    ):
        assert shared.need == DeviceNeed(4, kind="sim", share=quarter, sets=sets)
    alone = key_for(asked(mark), "sim", lambda kind: Traits(default)).need
    assert alone is not None
    assert alone.sets == 1
