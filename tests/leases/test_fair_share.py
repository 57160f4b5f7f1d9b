"""What a session has had of its devices, and what that costs it in the queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.leases.fair_share import Usage

SECONDS = st.floats(0.0, 1000.0)
PARTS = st.floats(0.0, 1.0)


@given(st.lists(st.tuples(SECONDS, PARTS), max_size=20))
def test_it_never_costs_more_than_is_promised(steps: list[tuple[float, float]]) -> None:
    usage = Usage(moment=5.0)
    for seconds, part in steps:
        usage = usage.at(usage.moment + seconds, part)
        assert 0.0 <= usage.handicap <= 40.0 + 1e-6


@given(SECONDS, SECONDS, PARTS)
def test_how_often_one_looks_makes_no_difference(first: float, second: float, part: float) -> None:
    begin = Usage(3.0, 0.0)
    twice = begin.at(first, part).at(first + second, part)
    once = begin.at(first + second, part)
    assert twice.seconds == pytest.approx(once.seconds, rel=1e-6, abs=1e-6)


@given(st.floats(0.1, 50.0), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_who_has_more_is_later(seconds: float, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert Usage().at(seconds, less).handicap <= Usage().at(seconds, more).handicap


def test_what_is_long_ago_does_not_count() -> None:
    busy = Usage().at(100.0, 1.0)
    assert busy.handicap == pytest.approx(40.0, abs=0.01)
    assert busy.at(160.0, 0.0).handicap < 0.2
    assert busy.at(99.0, 0.0) == Usage(busy.seconds, 99.0)  # A clock that was set back.
