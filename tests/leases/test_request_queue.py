"""Tests of the queue of requests that wait in one session, and of the text that says what they wait for."""

from __future__ import annotations

import time

from pytest_accel.leases.holder import Holder
from pytest_accel.leases.policy import Request, shortages
from pytest_accel.leases.request_queue import Obstacles, RequestQueue
from tests.leases.requests import demand_of

NOON = time.mktime((2020, 2, 3, 12, 0, 0, 0, 0, -1))
ADA = Holder(71, "ada", "test_big.py::test_one", NOON)
BOB = Holder(72, "bob", "test_two", NOON)


def queue_of(*requests: Request, arrivals: tuple[float, ...] = ()) -> RequestQueue:
    queue = RequestQueue()
    for request, arrival in zip(requests, arrivals or range(10, 10 + len(requests)), strict=True):
        queue.add(request, demand_of(Holder(1, "ada", f"test_{request.id}", 0.0)), print, arrival)
    return queue


def test_arrival_times_increase_even_if_the_clock_is_set_back() -> None:
    queue = queue_of(*(Request(number, ("a",), 1) for number in (1, 2, 3)), arrivals=(10.0, 5.0, 11.0))
    times = [waiting.since for number in (1, 2, 3) if (waiting := queue.get(number)) is not None]
    assert times[0] == 10.0
    assert times[0] < times[1] < times[2] == 11.0


def test_requests_for_the_same_devices_or_slots_are_ahead() -> None:
    queue = queue_of(
        Request(1, ("a", "b"), 1), Request(2, ("c",), 1), Request(3, (), 0, slots=1), Request(4, ("b",), 1, slots=1)
    )
    assert [one.test for one in queue.ahead_of(4)] == ["test_1", "test_3"]
    assert queue.ahead_of(2) == []
    queue = queue_of(Request(7, ("a",), 1), Request(3, ("a",), 1))
    assert [one.test for one in queue.ahead_of(3)] == ["test_7"], "the order is that of the arrival"
    assert queue.ahead_of(7) == []


def test_a_request_is_behind_another_session_that_has_waited_longer_for_one_of_the_devices() -> None:
    waiting = queue_of(Request(1, ("a", "b"), 2)).first
    assert waiting is not None
    assert not waiting.is_behind({"a": 10.0, "b": 11.0, "c": 1.0}, ("a", "b"))
    assert waiting.is_behind({"b": 9.0}, ("a", "b"))


def test_all_candidates_of_a_request_that_needs_an_unavailable_device_are_awaited() -> None:
    queue = queue_of(Request(1, ("a", "b"), 2), Request(2, ("b", "c"), 2), Request(3, ("d",), 1))
    lacking = shortages(queue.requests, {}, 0)
    assert queue.awaited(lacking, {"a"}) == {"a": 10.0, "b": 10.0}
    assert queue.awaited(lacking, {"c"}) == {"b": 11.0, "c": 11.0}
    assert queue.awaited(lacking, {"b"}) == {"a": 10.0, "b": 10.0, "c": 11.0}


def test_a_request_for_slots_awaits_no_device() -> None:
    queue = queue_of(Request(1, ("a",), 1, slots=1))
    assert queue.awaited(shortages(queue.requests, {"a": 1000}, 0), {"a"}) == {"a": 10.0}
    free = dict.fromkeys(("a",), 10**6)
    assert queue.awaited(shortages(queue.requests, free, 0), {"a"}) == {}


def test_released_devices_are_reserved_for_the_first_request_unless_another_session_has_waited_longer() -> None:
    queue = queue_of(Request(1, ("a", "b"), 2), Request(2, ("b", "c"), 2))
    lacking = shortages(queue.requests, {}, 0)
    reserved = queue.reserved(lacking, ("b", "c", "d"), {})
    assert {device: one.test for device, one in reserved.items()} == {"b": "test_1", "c": "test_2"}
    assert queue.reserved(lacking, ("b", "c"), {"b": 10.5, "c": 10.5}).keys() == {"b"}
    assert queue.reserved(lacking, ("b", "c"), {"b": 9.0, "c": 9.0}) == {}


def test_devices_of_one_holder_share_a_line() -> None:
    obstacles = Obstacles({"a": ADA, "b": BOB, "c": ADA}, (), 2, (BOB,))
    assert obstacles.lines({"d": "waits for its memory to be released"}) == [
        "a, c are held by pid 71 (ada) for test_big.py::test_one since 2020-02-03 12:00:00",
        "b is held by pid 72 (bob) for test_two since 2020-02-03 12:00:00",
        "d waits for its memory to be released",
        "pid 72 (bob) for test_two since 2020-02-03 12:00:00 has waited longer",
    ]
    [many] = Obstacles({f"d{number}": ADA for number in range(20)}, (), 1, ()).lines({})
    assert many.partition(" are held by ")[0] == f"{', '.join(f'd{number}' for number in range(15))} and 5 more"


def test_users_of_slots_are_named() -> None:
    assert Obstacles({}, [(1, ADA), (2, BOB)], 4, ()).lines({}) == [
        "1 of 4 is held by pid 71 (ada) for test_big.py::test_one since 2020-02-03 12:00:00",
        "2 of 4 are held by pid 72 (bob) for test_two since 2020-02-03 12:00:00",
    ]


def test_a_holder_of_today_is_named_with_the_time_only_and_an_unknown_one_without() -> None:
    now = time.time()
    [today] = Obstacles({"a": Holder(71, "ada", "test_one", now)}, (), 1, ()).lines({})
    assert today == f"a is held by pid 71 (ada) for test_one since {time.strftime('%H:%M:%S', time.localtime(now))}"
    [unknown] = Obstacles({"a": Holder.unknown()}, (), 1, ()).lines({})
    assert unknown == "a is held by an unknown session"
