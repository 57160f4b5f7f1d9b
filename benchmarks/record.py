"""CPU time that ``--accel-record`` adds to a test.

The minima of several runs are compared: the CPU time of a session varies by ten times the cost of a record, and
disturbances only increase it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, Effort, Figure, interleaved, session

_LIMIT = 0.1  # milliseconds


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the milliseconds that ``--accel-record`` adds to a plain test and one of two ranks, in all processes."""
    cases = {
        "plain test": (
            suites.write(folder / "plain", suites.TRIVIAL, effort.many // 3, head="", files=100),
            effort.many // 3,
        ),
        "two ranks": (
            suites.write(folder / "two", suites.all_reduce('2, kind="cpu"'), effort.tests, files=10),
            effort.tests,
        ),
    }
    found = []
    for name, (suite, tests) in cases.items():
        without = partial(session, suite, [*PLUGINS, *WITH])
        recorded = partial(session, suite, [*PLUGINS, *WITH, f"--accel-record={folder / 'record.jsonl'}"])
        runs = interleaved({f"{name}, without a record": without, f"{name}, recorded": recorded}, effort.runs * 3)
        bare, ours = ([run.cpu / tests * 1e3 for run in group] for group in runs.values())
        added = min(ours) - min(bare)
        others = max(run.others for group in runs.values() for run in group)
        note = f"minimum of {len(bare)} runs: {min(ours):.2f} ms, {min(bare):.2f} ms without"
        found.append(
            Figure(f"{name}, CPU time added by the record", added, "ms", _LIMIT, "0.1 ms", others=others, note=note)
        )
    return found
