"""Tests of the plan: its rules over whole simulated sessions, and its choice in single states."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.features.order.backlog import Backlog, Task
from pytest_accel.features.order.plan import Need, Offer, Running, choose
from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request, decide

DEVICES = tuple(f"d{number}" for number in range(4))


def need(count: int, share: float = 1.0) -> Need:
    """Return the need for `count` devices, or for `share` of each of them."""
    if not count:
        return Need()
    parts = () if share == 1 else (int(share * WHOLE),) * len(DEVICES)
    return Need((Request(0, DEVICES, count, parts=parts),), count * share / len(DEVICES), count * share)


NEEDS = [need(0), need(1), need(2), need(3), need(4), need(1, 0.5), need(2, 0.25)]


@dataclass(frozen=True)
class PlannedSuite:
    """A suite, the seconds that its tests take, and the number of workers."""

    tasks: tuple[Task, ...]
    seconds: tuple[float, ...]
    workers: int


@st.composite
def cases(draw: st.DrawFn) -> PlannedSuite:
    times = st.sampled_from((0.01, 0.1, 0.3, 1.0, 2.0, 7.0, 30.0))
    count = draw(st.integers(1, 25))
    tasks = [
        Task(
            index,
            draw(st.integers(0, len(NEEDS) - 1)),
            draw(st.sampled_from(("a", "b", "c"))),
            draw(st.none() | times),
        )
        for index in range(count)
    ]
    return PlannedSuite(tuple(tasks), tuple(draw(times) for _ in tasks), draw(st.integers(1, 8)))


@dataclass
class SimulatedSession:
    """A simulated session of a case, which checks every decision of the plan."""

    case: PlannedSuite
    now: float = 0.0
    order: list[int] = field(default_factory=list)
    idle: int = 0
    """How often a worker was left without a test although one would have fitted."""

    def run(self) -> SimulatedSession:
        """Run all tests, and return the session."""
        backlog = Backlog(NEEDS, list(self.case.tasks))
        free = dict.fromkeys(DEVICES, WHOLE)
        running: list[tuple[float, int, Running]] = []
        while backlog.count or running:
            while backlog.count and len(running) < self.case.workers:
                now = [one for _, _, one in running]
                start = choose(backlog.offers(), now, free, 0, horizon=10.0)
                if start is None:
                    self._check_wait(backlog, now, free)
                    break
                task = backlog.take(start.key, None, start.limit)
                self.order.append(task.index)
                requests = NEEDS[task.need].requests
                assert len({name for name, _ in start.devices}) == sum(request.count for request in requests)
                for device, parts in start.devices:
                    assert parts == requests[0].takes(device)
                    free[device] -= parts
                    assert free[device] >= 0
                one = Running(start.key, start.devices, 0, backlog.expected(task))
                heapq.heappush(running, (self.now + self.case.seconds[task.index], task.index, one))
            self.now, index, ended = heapq.heappop(running)
            backlog.record(index, self.case.seconds[index])
            for device, parts in ended.devices:
                free[device] += parts
        assert free == dict.fromkeys(DEVICES, WHOLE)
        return self

    def _check_wait(self, backlog: Backlog, running: Sequence[Running], free: dict[str, int]) -> None:
        """Check that a worker may wait: no test fits, or those that fit would delay one that does not."""
        assert running
        offers = backlog.offers()
        assert all(offer.need.requests for offer in offers)
        fitting = [offer for offer in offers if decide(offer.need.requests, free, 0)]
        if fitting:
            self.idle += 1
            assert len(fitting) < len(offers)


@given(cases())
def test_every_test_runs_once_and_no_device_is_used_twice(case: PlannedSuite) -> None:
    session = SimulatedSession(case).run()
    assert sorted(session.order) == list(range(len(case.tasks)))


@given(cases())
def test_no_worker_waits_while_devices_are_free_if_all_tests_are_equal(case: PlannedSuite) -> None:
    equal = PlannedSuite(
        tuple(Task(one.index, 2, one.module, one.expected) for one in case.tasks), case.seconds, case.workers
    )
    assert SimulatedSession(equal).run().idle == 0


def offers(*sizes: tuple[int, float]) -> list[Offer]:
    """Return one offer for each number of a need (in `NEEDS`) with the expected seconds of its tests."""
    return [Offer(number, NEEDS[size], longest, longest) for number, (size, longest) in enumerate(sizes)]


FREE = dict.fromkeys(DEVICES, WHOLE)


def chosen(*sizes: tuple[int, float], horizon: float = 100.0, **state: object) -> int | None:
    """Return the number of the chosen offer, or None. `state` has running tests, free devices and warm worlds."""
    running: Sequence[Running] = state.get("running", ())  # type: ignore[assignment]
    free = FREE | state.get("free", {})  # type: ignore[operator]
    start = choose(offers(*sizes), running, free, 0, horizon, state.get("warm", ()))  # type: ignore[arg-type]
    return None if start is None else start.key


def test_tests_with_more_devices_go_first() -> None:
    assert chosen((1, 9), (4, 1), (2, 5)) == 1


def test_a_test_as_long_as_all_others_goes_before_larger_ones() -> None:
    assert chosen((1, 90), (2, 5)) == 0


def test_a_long_test_does_not_go_before_tests_that_cannot_run_at_the_same_time() -> None:
    assert chosen((1, 90), (2, 5), (4, 5)) == 2


def test_a_test_with_a_warm_world_goes_before_others_of_its_size() -> None:
    assert chosen((2, 5), (2, 1), warm={1}) == 1
    assert chosen((2, 5), (2, 1)) == 0


def risky_first(*sizes: int, try_first: bool = True) -> int | None:
    """Return the number of devices of the test that starts, if each test may take many times its expected time."""
    risky = [replace(offer, risky=True) for offer in offers(*((size, 1.0) for size in sizes))]
    start = choose(risky, (), FREE, 0, 100.0, try_first=try_first)
    return None if start is None else sizes[start.key]


def test_risky_tests_go_from_small_to_large() -> None:
    assert risky_first(0, 1, 2) == 1
    assert risky_first(0, 2) == 2


def test_risky_tests_that_cannot_overlap_go_from_large_to_small() -> None:
    assert risky_first(1, 2, 3, 4) == 4
    assert risky_first(1, 2, 3) == 3


def test_risky_tests_go_from_large_to_small_with_few_workers() -> None:
    assert risky_first(1, 2, try_first=False) == 2


def test_one_long_test_makes_the_others_risky() -> None:
    backlog = Backlog([need(1), need(2)], [Task(index, index % 2, "a") for index in range(12)])
    for index in (0, 2, 4):
        backlog.take(0, None)
        backlog.record(index, 1.0)
    assert [offer.risky for offer in backlog.offers()] == [False, False]
    backlog.take(0, None)
    backlog.record(6, 60.0)
    assert [offer.risky for offer in backlog.offers()] == [True, True]


def test_tests_with_known_durations_are_not_risky() -> None:
    known = [Task(index, 1, "a", 1.0) for index in range(4, 8)]
    backlog = Backlog([need(1), need(2)], [*(Task(index, 0, "a") for index in range(4)), *known])
    for index, seconds in enumerate((1.0, 1.0, 1.0, 60.0)):
        backlog.record(index, seconds)
    assert [offer.risky for offer in backlog.offers()] == [True, False]


HELD = Running(9, (("d0", WHOLE), ("d1", WHOLE)), 0, 10.0)
TAKEN = {"d0": 0, "d1": 0}


def test_a_test_that_waits_for_all_devices_reserves_the_free_ones() -> None:
    assert chosen((4, 5), (1, 11), running=[HELD], free=TAKEN) is None


def test_a_test_that_ends_early_enough_may_use_reserved_devices() -> None:
    assert chosen((4, 5), (1, 9), running=[HELD], free=TAKEN) == 1


def test_devices_that_a_waiting_test_does_not_need_are_used() -> None:
    assert chosen((3, 5), (1, 60), running=[HELD], free=TAKEN) == 1
    running = [HELD, Running(8, (("d2", WHOLE),), 0, 90.0)]
    assert chosen((3, 5), (1, 60), running=running, free=TAKEN | {"d2": 0}) is None


def test_a_test_without_devices_starts_while_others_wait_for_devices() -> None:
    start = choose([Offer(0, Need(), 1.0, 1.0)], [HELD], FREE | TAKEN, 0, 100.0)
    assert start is not None
    assert start.devices == ()


def test_a_test_starts_when_all_its_leases_can_be_granted() -> None:
    license, slots = Request(0, ("license-0",), 1), Request(0, (), 0, slots=1)
    offers = [Offer(0, Need((license, slots), 1.0), 5.0, 5.0), Offer(1, Need(), 1.0, 1.0)]

    def key(license_parts: int, free_slots: int) -> int | None:
        start = choose(offers, [], {"license-0": license_parts}, free_slots, 100.0)
        return None if start is None else start.key

    assert (key(WHOLE, 1), key(0, 1), key(WHOLE, 0)) == (0, 1, 1)
    start = choose(offers[:1], [], {"license-0": WHOLE}, 1, 100.0)
    assert start is not None
    assert (start.devices, start.slots) == ((("license-0", WHOLE),), 1)


def test_licenses_do_not_count_as_devices_for_other_workers() -> None:
    """With two free devices, a test of two would leave none to the other free worker."""
    license = Request(0, ("license-0", "license-1"), 1)
    offers = [
        Offer(1, need(2), 5.0, 5.0),
        Offer(2, replace(need(1), requests=(*need(1).requests, license)), 5.0, 5.0),
    ]
    free = {"d0": WHOLE, "d1": WHOLE, "d2": 0, "d3": 0, "license-0": WHOLE, "license-1": WHOLE}
    start = choose(offers, [], free, 0, 100.0, other_workers=1)
    assert start is not None
    assert start.key == 2


@pytest.mark.parametrize("unknown", [False, True])
def test_tests_of_a_module_stay_together(unknown: bool) -> None:
    tasks = [Task(index, 0, "ab"[index % 2], None if unknown else 0.01) for index in range(8)]
    backlog = Backlog([need(0)], tasks)
    first = backlog.take(0, None).module
    assert [backlog.take(0, first).module for _ in range(3)] == [first] * 3
    assert backlog.take(0, first).module != first


def test_the_backlog_takes_the_longest_test_within_a_limit() -> None:
    backlog = Backlog([need(1)], [Task(index, 0, "a", seconds) for index, seconds in enumerate((3.0, 9.0, 0.5))])
    assert backlog.take(0, None, limit=4.0).index == 0
    assert backlog.peek(0, None) == 1
    assert [backlog.take(0, None).index for _ in range(2)] == [1, 2]
    backlog.add(1)
    assert (backlog.count, backlog.take(0, None).index) == (1, 1)


def test_unknown_durations_are_estimated_from_known_ones() -> None:
    backlog = Backlog([need(0), need(1)], [Task(0, 0, "a"), Task(1, 1, "a"), Task(2, 1, "a"), Task(3, 0, "a")])
    backlog.record(1, 4.0)
    assert backlog.expected(backlog.tasks[2]) == 4.0
    assert backlog.expected(backlog.tasks[3]) == 4.0
    backlog.record(0, 2.0)
    assert backlog.expected(backlog.tasks[3]) == 2.0
