from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_accel.core.device import Device, DeviceNeed, Share
from pytest_accel.core.requirement import Requirement
from pytest_accel.core.world_key import Traits, WorldShape, shape_of
from pytest_accel.mark_arguments import requirement
from pytest_accel.marks import Marks

devices, distributed = pytest.mark.devices, pytest.mark.distributed


def asked(*decorators: pytest.MarkDecorator) -> Requirement:
    """What these marks ask for."""
    marks = {decorator.name: decorator.mark for decorator in decorators}
    found = requirement(Marks(marks.get("devices"), marks.get("distributed")))
    assert found is not None
    return found


def shape(*decorators: pytest.MarkDecorator, session: str | None = "sim") -> WorldShape:
    return shape_of(asked(*decorators), session)


def test_devices_alone_are_one_process() -> None:
    assert shape(devices(2)) == WorldShape("sim", DeviceNeed(2), 1, grouped=False, devices_per_rank=2)
    assert shape(devices(2)).about == "sim"


def test_devices_are_leased_whatever_their_kind() -> None:
    assert shape(devices(kind="cpu")).need == DeviceNeed(1, kind="cpu")
    assert shape(devices(kind="cuda"), session=None).kind == "cuda"
    assert shape(devices(1), session=None).kind == "none"


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
    found = shape(mark, session=session)
    assert (found.kind, found.ranks, found.grouped) == (kind, 4, True)
    assert (found.need.count if found.need else None) == leased
    assert found.devices_per_rank == (leased or 0) // 4
    assert found.about == f"4 on {kind}"


def test_both_marks_describe_each_rank() -> None:
    found = shape(devices(2, memory="8GiB", name="*H100*"), distributed(3, backend="gloo", visible="rank"))
    assert found.need == DeviceNeed(6, kind="sim", memory=8 * 1024**3, name="*H100*")
    assert (found.ranks, found.devices_per_rank, found.backend, found.visible) == (3, 2, "gloo", "rank")


def test_devices_of_the_cpu_are_leased_where_both_marks_ask_for_them() -> None:
    assert shape(devices(1, kind="cpu"), distributed(2)).need == DeviceNeed(2, kind="cpu")


OTHERS: tuple[Callable[[], WorldShape], ...] = (
    lambda: shape(distributed(3)),
    lambda: shape(distributed(2), session=None),
    lambda: shape(distributed(2, backend="gloo")),
    lambda: shape(distributed(2, init=False)),
    lambda: shape(distributed(2, devices_per_rank=2)),
    lambda: shape(distributed(2, visible="rank")),
    lambda: shape(distributed(2, env={"A": "1"})),
    lambda: shape(distributed(2), devices(memory="8GiB")),
    lambda: shape(devices(2)),
)


@pytest.mark.parametrize("other", OTHERS)
def test_tests_that_ask_for_unlike_worlds_share_none(other: Callable[[], WorldShape]) -> None:
    assert other() != shape(distributed(2))
    assert other() == other()
    assert hash(other()) == hash(other())


def test_how_long_a_phase_may_take_is_no_matter_of_the_world() -> None:
    assert shape(distributed(2, timeout=5)) == shape(distributed(2))


def test_fresh_may_come_from_the_mark_or_the_session() -> None:
    assert shape(distributed(fresh=True)).fresh
    assert shape(devices(fresh=True)).fresh
    assert shape_of(asked(distributed(2)), "sim", fresh=True).fresh
    assert not shape(distributed(2)).fresh


def test_a_world_of_a_shape() -> None:
    found = shape(distributed(2, devices_per_rank=2, backend="gloo", env={"A": "1"}, init=False))
    leased = tuple(Device("sim", f"sim-{number}", number, "sim") for number in range(4))
    spec = found.spec(7, leased, "8")
    assert (spec.world, spec.ranks, spec.grouped, spec.kind, spec.kind_argument) == (7, 2, True, "sim", "8")
    assert (spec.backend, spec.init, spec.env) == ("gloo", False, (("A", "1"),))
    assert [spec.devices_of(rank) for rank in range(2)] == [leased[:2], leased[2:]]
    assert spec.seen_by(1) == leased


def test_a_rank_that_sees_its_own_devices_only() -> None:
    leased = tuple(Device("sim", f"sim-{number}", number, "sim") for number in range(2))
    spec = shape(distributed(2, visible="rank")).spec(1, leased, None)
    assert [spec.seen_by(rank) for rank in range(2)] == [leased[:1], leased[1:]]


def test_ranks_leave_a_kind_alone_whose_tensors_no_group_takes() -> None:
    def traits(kind: str) -> Traits:
        return Traits(ranks=kind != "mps")

    def found(*decorators: pytest.MarkDecorator) -> WorldShape:
        return shape_of(asked(*decorators), "mps", traits)

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
        shape_of(asked(devices(share=0.25), mark), "sim", lambda kind: Traits(default)),
        shape_of(asked(mark), "sim", lambda kind: Traits(default, share=quarter)),
    ):
        assert shared.need == DeviceNeed(4, kind="sim", share=quarter, sets=sets)
    alone = shape_of(asked(mark), "sim", lambda kind: Traits(default)).need
    assert alone is not None
    assert alone.sets == 1
