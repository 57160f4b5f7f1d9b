"""Tests of the text that says who holds the devices and slots that a request waits for."""

from __future__ import annotations

import time

from pytest_accel.leases.holder import Holder
from pytest_accel.leases.obstacles import Obstacles

NOON = time.mktime((2020, 2, 3, 12, 0, 0, 0, 0, -1))
ADA = Holder(71, "ada", "test_big.py::test_one", NOON)
BOB = Holder(72, "bob", "test_two", NOON)


def test_devices_of_one_holder_share_a_line() -> None:
    obstacles = Obstacles({"a": ADA, "b": BOB, "c": ADA}, (), 2, (BOB,))
    assert obstacles.lines({"d": "waits for its memory to be released"}) == [
        "a, c are held by pid 71 (ada) for test_big.py::test_one since 2020-02-03 12:00:00",
        "b is held by pid 72 (bob) for test_two since 2020-02-03 12:00:00",
        "d waits for its memory to be released",
        "pid 72 (bob) for test_two since 2020-02-03 12:00:00 has waited longer",
    ]


def test_users_of_slots_are_named() -> None:
    assert Obstacles({}, [(1, ADA), (2, BOB)], 4, ()).lines({}) == [
        "1 of 4 is held by pid 71 (ada) for test_big.py::test_one since 2020-02-03 12:00:00",
        "2 of 4 are held by pid 72 (bob) for test_two since 2020-02-03 12:00:00",
    ]


def test_a_holder_of_today_is_named_with_the_time_only_and_an_unknown_one_without() -> None:
    now = time.time()
    [today] = Obstacles({"a": Holder(71, "ada", "test_one", now)}, (), 1, ()).lines({})
    assert today == f"a is held by pid 71 (ada) for test_one since {time.strftime('%H:%M:%S', time.localtime(now))}"
    [unknown] = Obstacles({"a": Holder(0, "unknown", "unknown", 0.0)}, (), 1, ()).lines({})
    assert unknown == "a is held by an unknown session"
