"""Tests of `RemainingTime`, the estimate of the remaining seconds of a session."""

from __future__ import annotations

import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.order.durations_file import Durations
from pytest_accel.features.planning.forecast import SuiteOnMachine
from pytest_accel.features.planning.remaining_time import RemainingTime
from pytest_accel.hardware.hypothetical_machine import PretendedMachine


def remaining(durations: Durations, workers: int) -> RemainingTime:
    """Return the estimate for two tests that need all 4 devices, and two that need none."""
    key = WorldKey("sim", DeviceNeed(4, "sim"), 1, grouped=False, devices_per_rank=4)
    tests = [("big_1", key), ("big_2", key), ("plain_1", None), ("plain_2", None)]
    return RemainingTime(SuiteOnMachine.of(tests, durations, PretendedMachine(4, "sim"), 2), workers)


TIMES: Durations = {
    "big_1": {"sim": [10.0]},
    "big_2": {"sim": [20.0]},
    "plain_1": {"none": [4.0]},
    "plain_2": {"none": [6.0]},
}


def test_the_estimate_is_bounded_by_workers_devices_and_the_longest_test() -> None:
    assert remaining(TIMES, 1).seconds({}, ()) == pytest.approx(40.0)
    assert remaining(TIMES, 2).seconds({}, ()) == pytest.approx(30.0)
    assert remaining(TIMES, 4).seconds({"big_1": 1}, ()) == pytest.approx(20.0)


def test_ended_tests_and_the_elapsed_time_of_running_tests_do_not_count() -> None:
    assert remaining(TIMES, 1).seconds(dict.fromkeys(["big_1", "plain_1"], 1), [("big_2", 5.0)]) == pytest.approx(21.0)
    assert remaining(TIMES, 1).seconds(dict.fromkeys(["big_1", "plain_1", "plain_2"], 1), [("big_2", 500.0)]) == 0.0
    assert remaining(TIMES, 1).seconds(dict.fromkeys(TIMES, 1), ()) == 0.0


def test_there_is_no_estimate_if_most_times_are_unknown() -> None:
    half = {test: TIMES[test] for test in ("big_1", "plain_1")}
    assert remaining(half, 1).seconds({}, ()) == pytest.approx(28.0)
    assert remaining({"big_1": {"sim": [10.0]}}, 1).seconds({}, ()) is None


def test_tests_with_one_node_id_count_separately() -> None:
    suite = SuiteOnMachine.of([("same", None)] * 3, {"same": {"none": [8.0]}}, PretendedMachine(4, "sim"), 2)
    one_worker = RemainingTime(suite, 1)
    assert one_worker.seconds({"same": 1}, ()) == pytest.approx(16.0)
    assert one_worker.seconds({"same": 1}, [("same", 2.0), ("same", 3.0)]) == pytest.approx(11.0)
    assert one_worker.seconds({"same": 1}, [("same", 2.0)]) == pytest.approx(14.0)
    assert one_worker.seconds({"same": 4}, ()) == 0.0
