"""How evenly a suite is divided among jobs (``--accel-shard``): the mixes of `makespan` under a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.makespan import DEVICES, MIXES, WORKERS, ours
from benchmarks.measure import Effort, Figure, middle
from benchmarks.virtual import Test, UniformMachine
from pytest_accel.schedule.shards import SplitTest, partition

_SEEDS = 6
_TARGETS = {True: 1.05, False: 1.15}
"""The target with stored times, and without."""


def over_mean(mix: str, seed: int, parts: int, *, timed: bool) -> float:
    """Return the makespan of the slowest part over the mean of all parts, or over the longest test if that is more.

    Without `timed`, no time is known, neither for the division nor for the scheduler of each part.
    """
    tests = MIXES[mix](random.Random(seed))
    names = [f"sim-{number}" for number in range(DEVICES)]
    split = [
        SplitTest(f"test_{test.module}.py::test_{number}", test.seconds if timed else 1.0, test.request(names))
        for number, test in enumerate(tests)
    ]
    found = partition(split, parts, WORKERS, 0, timed=timed)
    times = [_makespan([tests[index] for index in part], timed=timed) for part in found]
    return max(times) / max(sum(times) / parts, max(test.seconds for test in tests))


def _makespan(tests: Sequence[Test], *, timed: bool) -> float:
    machine = UniformMachine(tests, DEVICES, WORKERS)
    machine.simulate(ours(machine, [test.seconds if timed else None for test in tests]))
    return max(span.end for span in machine.spans)


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Divide each mix among two, four and eight jobs."""
    found = []
    for timed, target in _TARGETS.items():
        for mix in MIXES:
            values = tuple(over_mean(mix, seed, parts, timed=timed) for parts in (2, 4, 8) for seed in range(_SEEDS))
            name = f"{mix}: slowest job, {'times known' if timed else 'no times'}"
            found.append(Figure(name, middle(values), "", target, f"{target:g} of the mean", values))
    return found
