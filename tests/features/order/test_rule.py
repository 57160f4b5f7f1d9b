"""Tests of the scheduler with simulated xdist workers under a virtual clock, and of the lower bounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.makespan import MIXES, accel_scheduler, ratios
from benchmarks.virtual import Test, UniformMachine
from pytest_accel.features.order.scheduler import DifferentTestsError
from pytest_accel.features.planning.forecast import lower_bound
from pytest_accel.features.planning.simulation import Worker


class CrashingMachine(UniformMachine):
    """A machine whose workers die in certain tests when these first run. Each dead worker is replaced."""

    def __init__(self, tests: Sequence[Test], devices: int, workers: int, crashing: set[int]) -> None:
        super().__init__(tests, devices, workers)
        self._crashing = crashing
        self.crashed: list[str] = []

    def run(self, worker: Worker, index: int) -> None:
        if index in self._crashing:
            self._crashing.remove(index)
            self.call_later(0.1, lambda: self._crash(worker))
        else:
            super().run(worker, index)

    def _crash(self, worker: Worker) -> None:
        worker.ended = True
        crashed = self.scheduler.remove_node(worker)
        assert crashed is not None
        self.crashed.append(crashed)
        self.scheduler.mark_test_pending(crashed)  # pytest-rerunfailures does the same before there is a replacement.
        replacement = Worker(self, len(self.workers))
        self.workers.append(replacement)
        self.scheduler.add_node(replacement)
        self.scheduler.add_node_collection(replacement, self.collection)
        self.scheduler.schedule()


@st.composite
def suites(draw: st.DrawFn) -> list[Test]:
    seconds = st.sampled_from((0.001, 0.01, 0.04, 0.3, 2.0, 9.0))
    sizes = st.sampled_from(((0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (1, 0.5), (2, 0.25)))
    return [Test(draw(seconds), *draw(sizes), draw(st.integers(0, 2))) for _ in range(draw(st.integers(1, 60)))]


def expectations(tests: Sequence[Test], known: int) -> list[float | None]:
    """Return the expected seconds of each test: known for every `known`-th test, for none if `known` is 0."""
    return [test.seconds if known and index % known == 0 else None for index, test in enumerate(tests)]


@given(suites(), st.integers(1, 6), st.integers(0, 3))
def test_every_test_runs_once(tests: list[Test], workers: int, known: int) -> None:
    machine = UniformMachine(tests, 4, workers)
    seconds = machine.simulate(accel_scheduler(machine, expectations(tests, known)))
    assert seconds >= lower_bound([(test.size, test.seconds) for test in tests], 4, workers) - 1e-6
    assert all(worker.ended for worker in machine.workers)


@given(suites(), st.integers(1, 6), st.sets(st.integers(0, 59), max_size=4))
def test_every_test_runs_once_if_workers_die(tests: list[Test], workers: int, crashing: set[int]) -> None:
    crashing = {index for index in crashing if index < len(tests)}
    machine = CrashingMachine(tests, 4, workers, set(crashing))
    machine.simulate(accel_scheduler(machine, expectations(tests, 0)))
    assert sorted(machine.crashed) == sorted(machine.collection[index] for index in crashing)


class DeadWorker(Worker):
    """A worker that has died, but xdist has not noticed it yet."""

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        raise OSError("cannot send (already closed?)")


def test_a_test_sent_to_a_dead_worker_is_sent_to_another_one() -> None:
    machine = UniformMachine([Test(1.0)] * 2, 4, 2)
    scheduler = accel_scheduler(machine, [1.0] * 2)
    dead, other, replacement = DeadWorker(machine, 2), *machine.workers
    for node in (dead, other):
        scheduler.add_node(node)
        scheduler.add_node_collection(node, machine.collection)
    scheduler.schedule()
    assert scheduler.remove_node(dead) is None
    scheduler.add_node(replacement)
    scheduler.add_node_collection(replacement, machine.collection)
    scheduler.schedule()
    assert sorted([*other.queue, *replacement.queue]) == [0, 1]


def test_a_worker_that_collected_other_tests_gets_none() -> None:
    machine = UniformMachine([Test(1.0)] * 4, 4, 2)
    scheduler = accel_scheduler(machine, [None] * 4)
    first, second = machine.workers
    for node in (first, second):
        scheduler.add_node(node)
    scheduler.add_node_collection(first, machine.collection)
    scheduler.add_node_collection(second, machine.collection[:2])
    scheduler.schedule()
    assert first.queue
    assert not second.queue


def test_a_single_worker_that_collected_other_tests_is_an_error() -> None:
    machine = UniformMachine([Test(1.0)] * 4, 4, 2)
    scheduler = accel_scheduler(machine, [None] * 4)
    first, replacement = machine.workers
    scheduler.add_node(first)
    scheduler.add_node_collection(first, machine.collection)
    scheduler.schedule()
    scheduler.remove_node(first)
    scheduler.add_node(replacement)
    one, two, *others = machine.collection
    with pytest.raises(DifferentTestsError, match="worker gw1 has collected other tests") as raised:
        scheduler.add_node_collection(replacement, [two, one, *others])
    assert f"3 remaining test(s) cannot be run: its test 1 is {two}, not {one}" in str(raised.value)


def test_the_test_queued_behind_a_running_one_is_on_hold() -> None:
    machine = UniformMachine([Test(1.0)] * 6, 4, 2)
    scheduler = accel_scheduler(machine, [1.0] * 6)
    for node in machine.workers:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, machine.collection)
    scheduler.schedule()
    for node in machine.workers:
        running, following = node.queue
        assert running not in node.held
        assert following in node.held


def test_short_tests_are_sent_together() -> None:
    machine = UniformMachine([Test(0.01)] * 100, 4, 2)
    scheduler = accel_scheduler(machine, [0.01] * 100)
    for node in machine.workers:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, machine.collection)
    scheduler.schedule()
    assert len(machine.workers[0].queue) > 10


def test_a_batch_is_not_larger_than_the_limit() -> None:
    machine = UniformMachine([Test(0.01)] * 100, 4, 2)
    scheduler = accel_scheduler(machine, [0.01] * 100, largest_batch=3)
    for node in machine.workers:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, machine.collection)
    scheduler.schedule()
    assert len(machine.workers[0].queue) == 4  # Three, and one on hold.


@pytest.mark.parametrize("mix", MIXES)
def test_the_makespan_is_close_to_the_lower_bound(mix: str) -> None:
    assert max(ratios(mix, "ours, with history", 2)) <= 1.03
    # In the heavy-tailed mix nothing predicts which test is long.
    assert max(ratios(mix, "ours, without", 2)) <= (1.25 if mix == "heavy-tailed" else 1.10)


@pytest.mark.parametrize("workers", [4, 8])
def test_the_makespan_is_close_to_the_lower_bound_with_few_workers(workers: int) -> None:
    assert max(ratios("half of them shared", "ours, with history", 2, workers)) <= 1.08


def test_lower_bounds_of_the_makespan() -> None:
    assert lower_bound([(3, 2.0)] * 4, 8, 8) == pytest.approx(4.0)  # Two at a time.
    assert lower_bound([(1, 2.0)] * 4, 8, 2) == pytest.approx(4.0)
    assert lower_bound([(0, 7.0), (8, 1.0)], 8, 2) == pytest.approx(7.0)
    assert lower_bound([(5, 1.0), (4, 1.0), (8, 1.0)], 8, 8) == pytest.approx(2.5)
