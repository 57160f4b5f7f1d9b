"""Tests of the times at which the broker's thread checks lock files and the wait queue."""

from __future__ import annotations

import pytest

from pytest_accel.leases.polling import PollSchedule


@pytest.fixture
def schedule() -> PollSchedule:
    return PollSchedule(100.0, 100.0, 100.0)


def test_a_thread_that_is_not_needed_ends_after_a_second(schedule: PollSchedule) -> None:
    assert not schedule.is_over(105.0, needed=True)
    assert not schedule.is_over(105.9, needed=False)
    assert schedule.is_over(106.1, needed=False)


def test_the_wait_queue_is_checked_sooner_after_a_hit(schedule: PollSchedule) -> None:
    assert schedule.queue_check_due(100.0)
    schedule.queue_checked(100.0, hit=False)
    assert not schedule.queue_check_due(100.09)
    assert schedule.queue_check_due(100.1)
    schedule.queue_checked(100.1, hit=True)
    assert schedule.queue_check_due(100.13)


def test_lock_files_are_checked_every_half_second(schedule: PollSchedule) -> None:
    assert [schedule.lock_check_due(100.0 + step / 4) for step in range(5)] == [True, False, True, False, True]


def test_polls_are_frequent_only_while_a_request_waits_for_another_session(schedule: PollSchedule) -> None:
    schedule.queue_checked(100.0, hit=False)
    assert schedule.pause(100.0, 99.5, waiting=True) == pytest.approx(0.002)
    assert schedule.pause(101.0, 99.5, waiting=True) == pytest.approx(0.020)
    assert schedule.pause(100.02, 99.5, waiting=False) == pytest.approx(0.08)
