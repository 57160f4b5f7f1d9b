"""Balance of the parts into which ``--accel-shard`` divides a suite: the mixes of `makespan` under a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.makespan import DEVICES, MIXES, WORKERS, accel_scheduler
from benchmarks.measure import Effort, Figure, middle
from benchmarks.virtual import Test, UniformMachine
from pytest_accel.features.order.tasks import Task
from pytest_accel.features.planning.division import partition

_SEEDS = 6
_TARGETS = {True: 1.05, False: 1.2}
"""Limits of the imbalance: with stored times, and without."""


def imbalance(mix: str, seed: int, parts: int, *, timed: bool) -> float:
    """Return the makespan of the slowest part divided by the larger of the mean makespan and the longest test.

    Unless `timed`, neither the partition nor the scheduler of each part knows the times of tests.
    """
    tests = MIXES[mix](random.Random(seed))
    names = [f"sim-{number}" for number in range(DEVICES)]
    tasks = [
        Task(f"test_{test.module}.py::test_{number}", test.need(names), test.seconds if timed else None)
        for number, test in enumerate(tests)
    ]
    shards = partition(tasks, [""] * len(tasks), parts, WORKERS)
    times = [_makespan([tests[index] for index in part], timed=timed) for part in shards]
    return max(times) / max(sum(times) / parts, max(test.seconds for test in tests))


def _makespan(tests: Sequence[Test], *, timed: bool) -> float:
    machine = UniformMachine(tests, DEVICES, WORKERS)
    machine.simulate(accel_scheduler(machine, [test.seconds if timed else None for test in tests]))
    return max(span.end for span in machine.spans)


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the median imbalance of each mix, over two, four and eight jobs and several seeds."""
    found = []
    for timed, target in _TARGETS.items():
        for mix in MIXES:
            values = tuple(imbalance(mix, seed, parts, timed=timed) for parts in (2, 4, 8) for seed in range(_SEEDS))
            name = f"{mix}: slowest job, {'times known' if timed else 'no times'}"
            found.append(Figure(name, middle(values), "", target, f"{target:g} of the mean", values))
    return found
