"""Tests of the forecast of a suite's makespan, and of the text about it (``--accel-plan``)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.features.order.tasks import SLOTS, Need, Task, seconds_of
from pytest_accel.features.planning.plan import clock, makespan

DEVICES = 4


def devices(count: int, share: float = 1.0) -> Need:
    return (("sim", count, count * share / DEVICES),)


def slots(count: int) -> Need:
    return ((SLOTS, count, count / 2),)


def licenses(count: int) -> Need:
    return (("license", count, count / 2),)


LEASES: list[Need] = [(), (), licenses(1), licenses(2)]
WORLDS: list[Need] = [(), *map(devices, (1, 2, 3, 4)), devices(2, share=0.5), slots(1), slots(2)]


@st.composite
def cases(draw: st.DrawFn) -> list[Task]:
    seconds = st.sampled_from((None, 0.0, 0.01, 0.3, 1.0, 2.5, 9.0))
    needs = st.tuples(st.sampled_from(WORLDS), st.sampled_from(LEASES))
    return [
        Task(f"test_{number}.py", world + lease, draw(seconds))
        for number, (world, lease) in enumerate(draw(st.lists(needs, min_size=1, max_size=30)))
    ]


@given(cases(), st.integers(1, 9))
def test_all_tests_run(tasks: list[Task], workers: int) -> None:
    seconds = seconds_of(tasks)
    assert max(seconds) - 1e-9 <= makespan(tasks, workers) <= sum(seconds) + 1e-9
    assert makespan(tasks, 1) == pytest.approx(sum(seconds))


def test_tests_that_share_licenses_run_one_after_the_other_beside_others() -> None:
    needs = [licenses(2), licenses(1), slots(1) + licenses(1), devices(1) + licenses(2), *[()] * 4]
    tasks = [Task(f"test_{number}", need, 3.0) for number, need in enumerate(needs)]
    assert makespan(tasks, 4) == pytest.approx(9.0)


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
