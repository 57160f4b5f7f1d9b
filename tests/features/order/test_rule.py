"""Tests of the rule and the scheduler with simulated xdist workers under a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.makespan import MIXES, accel_scheduler, lower_bound, ratios
from benchmarks.virtual import Test, UniformMachine, Worker


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
    assert sorted(index for index in (*other.queue, *replacement.queue) if index >= 0) == [0, 1]


@pytest.mark.parametrize("mix", MIXES)
def test_the_makespan_is_close_to_the_lower_bound(mix: str) -> None:
    assert max(ratios(mix, "ours, with history", 2)) <= 1.03
    # In the heavy-tailed mix nothing predicts which test is long.
    assert max(ratios(mix, "ours, without", 2)) <= (1.30 if mix == "heavy-tailed" else 1.10)
    assert max(ratios(mix, "ours, with history", 2, 8)) <= 1.06
