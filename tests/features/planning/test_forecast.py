"""Tests of the forecast of a suite's makespan, and of the text about it (``--accel-plan``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.device import DeviceNeed, Share
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.order.stored_durations import Entries
from pytest_accel.features.order.test_demand import Demand, Wanted
from pytest_accel.features.planning.forecast import Span, SuiteOnMachine, Times, assumed_times, critical_path
from pytest_accel.features.planning.plan import clock
from pytest_accel.hardware.hypothetical_machine import PretendedMachine

DEVICES = 4
SLOTS = 2


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


@dataclass(frozen=True)
class ForecastSuite:
    """A suite: the world keys of its tests, their leases and seconds, and whether these seconds are known."""

    keys: tuple[WorldKey | None, ...]
    leases: tuple[tuple[WorldKey, ...], ...]
    seconds: tuple[float, ...]
    known: tuple[bool, ...]

    def suite(self) -> SuiteOnMachine:
        names = [f"test_{index % 3}.py::test_{index}" for index in range(len(self.keys))]
        expected = tuple(one if known else None for one, known in zip(self.seconds, self.known, strict=True))
        times = Times(expected, self.seconds, len(names) - sum(self.known), 1.0)
        wanted = [leased if key is None else (key, *leased) for key, leased in zip(self.keys, self.leases, strict=True)]
        return SuiteOnMachine(names, Demand.of(wanted), times, MACHINE, SLOTS)


@st.composite
def cases(draw: st.DrawFn) -> ForecastSuite:
    count = draw(st.integers(1, 30))
    seconds = st.sampled_from((0.0, 0.01, 0.3, 1.0, 2.5, 9.0))
    return ForecastSuite(
        tuple(draw(st.sampled_from(KEYS)) for _ in range(count)),
        tuple(draw(st.sampled_from(LEASES)) for _ in range(count)),
        tuple(draw(seconds) for _ in range(count)),
        tuple(draw(st.booleans()) for _ in range(count)),
    )


def suite_of(tests: Sequence[tuple[str, Wanted]], stored: Entries) -> SuiteOnMachine:
    names, demand = [name for name, _ in tests], Demand.of(wanted for _, wanted in tests)
    times = assumed_times(stored, list(zip(names, demand.kinds_of_tests(), strict=True)))
    return SuiteOnMachine(names, demand, times, MACHINE, SLOTS)


@given(cases(), st.integers(1, 9))
def test_all_tests_run_and_the_critical_path_has_no_gap(case: ForecastSuite, workers: int) -> None:
    suite = case.suite()
    spans = suite.forecast(workers)
    assert sorted(span.index for span in spans) == list(range(len(case.keys)))
    least = suite.remaining({}, (), workers)
    assert (least or 0.0) - 1e-9 <= spans[-1].end <= sum(case.seconds) + 1e-9
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
    suite = suite_of(tests, {name: {"none": [(1.0, 3.0)], "sim": [(1.0, 3.0)]} for name, _ in tests})
    assert [suite.takes(index) for index in range(5)] == [
        "2 license devices",
        "1 license device",
        "1 CPU slot, 1 license device",
        "1 device, 2 license devices",
        "",
    ]
    spans = suite.forecast(4)
    assert spans[-1].end == pytest.approx(9.0)
    times = {suite.collection[span.index]: (span.begin, span.end) for span in spans}
    assert times["one"] == times["other"]
    assert len({times[name] for name in ("both", "one", "device")}) == 3


def test_the_critical_path_prefers_tests_on_the_same_device() -> None:
    same_device = Span(0, 0, 0.0, 2.0, (("d0", 1),))
    other = Span(1, 1, 0.0, 2.0, ())
    last = Span(2, 1, 2.0, 3.0, (("d0", 1),))
    assert critical_path([same_device, other, last]) == [same_device, last]
    assert critical_path([same_device, other, Span(2, 1, 2.0, 3.0, ())])[0] == other


def test_assumed_times_are_of_the_same_kind_or_another_kind_or_the_median() -> None:
    times = {"a": {"sim": 4.0, "cuda": 1.0}, "b": {"cuda": 2.0, "rocm": 3.0}, "c": {"sim": 6.0}}
    stored = {test: {kind: [(1.0, seconds)] for kind, seconds in kinds.items()} for test, kinds in times.items()}
    found = assumed_times(stored, [("a", "sim"), ("b", "sim"), ("c", "sim"), ("d", "sim")])
    assert found == Times((4.0, None, 6.0, None), (4.0, 3.0, 6.0, 4.0), 1, 4.0)
    assert assumed_times({}, [("a", "sim")]) == Times((None,), (1.0,), 1, 1.0)


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


TIMES: Entries = {
    "big_1": {"sim": [(1.0, 10.0)]},
    "big_2": {"sim": [(1.0, 20.0)]},
    "plain_1": {"none": [(1.0, 4.0)]},
    "plain_2": {"none": [(1.0, 6.0)]},
}


def timed_suite(stored: Entries) -> SuiteOnMachine:
    """Return two tests that need all 4 devices, and two that need none."""
    return suite_of([("big_1", (key(4),)), ("big_2", (key(4),)), ("plain_1", ()), ("plain_2", ())], stored)


@pytest.mark.parametrize(
    ("workers", "ended", "running", "seconds"),
    [
        (1, (), (), 40.0),
        (2, (), (), 30.0),
        (4, ("big_1",), (), 20.0),
        (1, ("big_1", "plain_1"), (("big_2", 5.0),), 21.0),
        (1, ("big_1", "plain_1", "plain_2"), (("big_2", 500.0),), 0.0),
        (1, TIMES, (), 0.0),
    ],
)
def test_the_remaining_time_is_bounded_by_workers_devices_and_the_longest_test(
    workers: int, ended: Iterable[str], running: tuple[tuple[str, float], ...], seconds: float
) -> None:
    found = timed_suite(TIMES).remaining(dict.fromkeys(ended, 1), running, workers)
    assert found == pytest.approx(seconds)


def test_there_is_no_remaining_time_if_most_times_are_unknown() -> None:
    assert timed_suite({test: TIMES[test] for test in ("big_1", "plain_1")}).remaining({}, (), 1) == pytest.approx(28.0)
    assert timed_suite({"big_1": TIMES["big_1"]}).remaining({}, (), 1) is None


def test_tests_with_one_node_id_count_separately() -> None:
    tests: list[tuple[str, Wanted]] = [("same", ())] * 3
    suite = suite_of(tests, {"same": {"none": [(1.0, 8.0)]}})
    assert suite.remaining({"same": 1}, (), 1) == pytest.approx(16.0)
    assert suite.remaining({"same": 1}, [("same", 2.0), ("same", 3.0)], 1) == pytest.approx(11.0)
    assert suite.remaining({"same": 4}, (), 1) == 0.0
