"""Tests of the forecast of a suite's makespan, and of the text about it (``--accel-plan``)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.device import DeviceNeed, Share
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.order.rule import Task
from pytest_accel.features.order.stored_durations import Entries
from pytest_accel.features.order.test_demand import Demand, Wanted
from pytest_accel.features.planning.forecast import Span, critical_path, seconds_of, simulate
from pytest_accel.features.planning.plan import clock, takes
from pytest_accel.hardware.hypothetical_machine import PretendedMachine

DEVICES = 4


def key(devices: int, share: float | None = None, ranks: int = 0) -> WorldKey:
    """Return the world key of a test with `devices` devices, or of one with `ranks` ranks on the CPU."""
    if not devices:
        return WorldKey("cpu", None, ranks, grouped=True)
    part = Share(fraction=share) if share else None
    return WorldKey("sim", DeviceNeed(devices, "sim", share=part), 1, grouped=False, devices_per_rank=devices)


def lease(count: int) -> WorldKey:
    """Return the key of a lease of `count` licenses."""
    return WorldKey("license", DeviceNeed(count, "license"), 0, grouped=False)


MACHINE = PretendedMachine(DEVICES, "sim", {"license": 2})
LEASES = [(), (), (lease(1),), (lease(2),)]
KEYS = [None, key(1), key(2), key(3), key(4), key(2, share=0.5), key(0, ranks=2), key(0, ranks=1)]


@st.composite
def cases(draw: st.DrawFn) -> list[Task]:
    wanted: list[Wanted] = []
    for _ in range(draw(st.integers(1, 30))):
        world = draw(st.sampled_from(KEYS))
        wanted.append((*(() if world is None else (world,)), *draw(st.sampled_from(LEASES))))
    seconds = st.sampled_from((None, 0.0, 0.01, 0.3, 1.0, 2.5, 9.0))
    return [
        task._replace(seconds=draw(seconds))
        for task in tasks_of([(f"test_{n}.py", one) for n, one in enumerate(wanted)], {})
    ]


def tasks_of(tests: Sequence[tuple[str, Wanted]], stored: Entries) -> list[Task]:
    return Demand.of(wanted for _, wanted in tests).tasks([name for name, _ in tests], stored, MACHINE)


@given(cases(), st.integers(1, 9))
def test_all_tests_run_and_the_critical_path_has_no_gap(tasks: list[Task], workers: int) -> None:
    spans = simulate(tasks, MACHINE.slots, workers)
    assert sorted(span.test for span in spans) == list(range(len(tasks)))
    seconds = seconds_of(tasks)
    assert max(seconds) - 1e-9 <= spans[-1].end <= sum(seconds) + 1e-9
    path = critical_path(spans)
    assert (path[0].begin, path[-1].end) == (0.0, spans[-1].end)
    assert [link.end for link in path[:-1]] == [link.begin for link in path[1:]]


def test_tests_that_share_licenses_run_one_after_the_other_beside_others() -> None:
    tests: list[tuple[str, Wanted]] = [
        ("both", (lease(2),)),
        ("one", (lease(1),)),
        ("other", (key(0, ranks=1), lease(1))),
        ("device", (key(1), lease(2))),
        *((f"plain_{n}", ()) for n in range(4)),
    ]
    tasks = tasks_of(tests, {name: {"none": [(1.0, 3.0)], "sim": [(1.0, 3.0)]} for name, _ in tests})
    assert [takes(task.need, MACHINE) for task in tasks[:5]] == [
        "2 license devices",
        "1 license device",
        "1 CPU slot, 1 license device",
        "1 device, 2 license devices",
        "",
    ]
    spans = simulate(tasks, MACHINE.slots, 4)
    assert spans[-1].end == pytest.approx(9.0)
    times = {tasks[span.test].nodeid: (span.begin, span.end) for span in spans}
    assert times["one"] == times["other"]
    assert len({times[name] for name in ("both", "one", "device")}) == 3


def test_the_critical_path_prefers_tests_on_the_same_device() -> None:
    same_device = Span(0, 0, 0.0, 2.0, (("d0", 1),))
    other = Span(1, 1, 0.0, 2.0, ())
    last = Span(2, 1, 2.0, 3.0, (("d0", 1),))
    assert critical_path([same_device, other, last]) == [same_device, last]
    assert critical_path([same_device, other, Span(2, 1, 2.0, 3.0, ())])[0] == other


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (0.041, "0.041 s"),
        (1.0, "1.0 s"),
        (119.9, "119.9 s"),
        (119.96, "2 min 00 s"),
        (725.4, "12 min 05 s"),
        (11100.0, "3 h 05 min"),
    ],
)
def test_durations_are_formatted_with_units(seconds: float, text: str) -> None:
    assert clock(seconds) == text
