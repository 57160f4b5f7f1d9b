"""Tests of the time limits of a test and of its phases."""

from __future__ import annotations

import pytest

from pytest_accel.diagnostics import waiting_limits
from pytest_accel.diagnostics.waiting_limits import PhaseLimit, TimeLimits


def test_the_limit_of_the_test_applies_if_it_expires_before_that_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(waiting_limits, "monotonic", lambda: now)
    limits = TimeLimits(60.0)
    assert limits.of_phase() == PhaseLimit(60.0, 60.0, since=100.0)
    limits.limit_test(70.0)
    assert limits.of_phase() == PhaseLimit(60.0, 60.0, since=100.0)
    now = 115.0
    assert limits.of_phase() == PhaseLimit(70.0, 55.0, since=115.0)
    now = 200.0
    assert limits.of_phase() == PhaseLimit(70.0, 0.0, since=200.0)
    limits.limit_test(None)
    assert limits.of_phase() == PhaseLimit(60.0, 60.0, since=200.0)


def test_the_time_of_a_phase_does_not_begin_before_the_driver_waits_for_it() -> None:
    assert PhaseLimit(70.0, 55.0, since=115.0).deadline(began=100.0) == 170.0
    assert PhaseLimit(70.0, 55.0, since=115.0).deadline(began=130.0) == 185.0
