"""Tests of the partition of a suite into the parts of several jobs (``--accel-shard``)."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.features.order.tasks import SLOTS, Task
from pytest_accel.features.planning.division import partition

_NEEDS = st.one_of(
    st.just(()),
    st.builds(lambda count: (("sim", count, count / 4),), st.integers(1, 4)),
    st.builds(lambda slots: ((SLOTS, slots, slots / 2),), st.integers(1, 2)),
)
_TESTS = st.lists(
    st.tuples(
        st.builds(
            Task,
            st.builds("m{}.py::C{}::t{}".format, *(st.integers(0, 3),) * 3),
            _NEEDS,
            st.sampled_from((None, 0.0, 0.1, 1.0, 1.0, 7.3, 60.0)),
        ),
        st.sampled_from(("", "", "", "one", "other")),
    ),
    max_size=40,
)
Tests = list[tuple[Task, str]]


def _partition(tests: Tests, parts: int, workers: int) -> list[list[int]]:
    return partition([task for task, _ in tests], [together for _, together in tests], parts, workers)


@given(_TESTS, st.integers(1, 9), st.integers(1, 8), st.randoms(use_true_random=False))
def test_each_test_is_in_exactly_one_part_and_all_jobs_agree(
    tests: Tests, parts: int, workers: int, draw: random.Random
) -> None:
    found = _partition(tests, parts, workers)
    assert len(found) == parts
    assert sorted(index for part in found for index in part) == list(range(len(tests)))
    # Other jobs may have collected the tests in another order.
    shuffled = tests.copy()
    draw.shuffle(shuffled)
    other = _partition(shuffled, parts, workers)
    assert [Counter(shuffled[index][0].nodeid for index in part) for part in other] == [
        Counter(tests[index][0].nodeid for index in part) for part in found
    ]
    for group in ("one", "other"):
        assert sum(any(tests[index][1] == group for index in part) for part in found) <= 1


def test_modules_are_not_split_if_the_parts_stay_equal() -> None:
    modules = [(Task(f"m{module}.py::test_{number}", seconds=1.0), "") for module in range(8) for number in range(5)]
    for part in _partition(modules, 4, 2):
        assert len({modules[index][0].module for index in part}) == 2
        assert len(part) == 10
