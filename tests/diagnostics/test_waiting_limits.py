"""Tests of the time limits of a test and of its phases."""

from __future__ import annotations

import pytest

from pytest_accel.diagnostics import waiting_limits
from pytest_accel.diagnostics.waiting_limits import TimeLimits


def test_the_limit_of_the_test_applies_if_it_expires_before_that_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(waiting_limits, "monotonic", lambda: now)
    limits = TimeLimits(60.0)
    assert limits.of_phase() == (60.0, 60.0)
    limits.limit_test(70.0)
    assert limits.of_phase() == (60.0, 60.0)
    now = 115.0
    assert limits.of_phase() == (70.0, 55.0)
    now = 200.0
    assert limits.of_phase() == (70.0, 0.0)
    limits.limit_test(None)
    assert limits.of_phase() == (60.0, 60.0)
