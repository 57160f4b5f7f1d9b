"""Tests of the partition of a suite into the parts of several jobs (``--accel-shard``)."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.features.order.rule import Need
from pytest_accel.features.planning.shards import SplitTest, partition
from pytest_accel.leases.policy import Request

NAMES = tuple(f"sim-{number}" for number in range(4))
_NEEDS = st.one_of(
    st.just(Need()),
    st.builds(lambda count: Need((Request(0, NAMES, count),), count / 4, NAMES), st.integers(1, 4)),
    st.builds(lambda slots: Need((Request(0, (), 0, slots=slots),), slots / 2), st.integers(1, 2)),
)
_TESTS = st.lists(
    st.builds(
        SplitTest,
        st.builds("m{}.py::C{}::t{}".format, *(st.integers(0, 3),) * 3),
        st.sampled_from((0.0, 0.1, 1.0, 1.0, 7.3, 60.0)),
        _NEEDS,
        st.sampled_from(("", "", "", "one", "other")),
    ),
    max_size=40,
)


@given(_TESTS, st.integers(1, 9), st.integers(1, 8), st.booleans(), st.randoms(use_true_random=False))
def test_each_test_is_in_exactly_one_part_and_all_jobs_agree(
    tests: list[SplitTest], parts: int, workers: int, timed: bool, draw: random.Random
) -> None:
    found = partition(tests, parts, workers, timed=timed)
    assert len(found) == parts
    assert sorted(index for part in found for index in part) == list(range(len(tests)))
    # Other jobs may have collected the tests in another order.
    shuffled = tests.copy()
    draw.shuffle(shuffled)
    other = partition(shuffled, parts, workers, timed=timed)
    assert [Counter(shuffled[index].nodeid for index in part) for part in other] == [
        Counter(tests[index].nodeid for index in part) for part in found
    ]


@given(_TESTS, st.integers(1, 9))
def test_tests_of_one_group_are_in_one_part(tests: list[SplitTest], parts: int) -> None:
    found = partition(tests, parts, 2, timed=True)
    part_of = {index: number for number, part in enumerate(found) for index in part}
    for group in ("one", "other"):
        assert len({part_of[index] for index, test in enumerate(tests) if test.together == group}) <= 1


def test_modules_are_not_split_if_the_parts_stay_equal() -> None:
    modules = [SplitTest(f"m{module}.py::test_{number}", 1.0) for module in range(8) for number in range(5)]
    for part in partition(modules, 4, 2, timed=True):
        names = {modules[index].nodeid.partition("::")[0] for index in part}
        assert len(names) == 2
        assert len(part) == 10
