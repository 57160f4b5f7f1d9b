"""Tests of `pytest_accel.core.clock`."""

from __future__ import annotations

import pytest

from pytest_accel.core import clock


def test_pauses_are_counted_once_and_from_a_moment_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, now = clock.Pauses(), [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    for now[0], due in ((10.0, 9.5), (20.0, 14.0), (20.1, 13.0), (50.0, 40.0)):
        pauses.notice(due)
    assert pauses.since(0.0) == pytest.approx(6.0 + 0.1 + 10.0)
    assert pauses.since(15.0) == pytest.approx(5.0 + 0.1 + 10.0)
    assert (pauses.since(45.0), pauses.since(60.0)) == (5.0, 0.0)
