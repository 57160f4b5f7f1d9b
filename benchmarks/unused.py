"""Cost of the plugin in sessions without marked tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import suites
from benchmarks.measure import (
    PLUGINS,
    ROOT,
    WITH,
    WITHOUT,
    Effort,
    Figure,
    SessionTimes,
    clean_environment,
    interleaved,
    middle,
    session,
)

_IMPORTS = 15
_IMPORT = """
import pytest, sys, time
begin = time.perf_counter()
import pytest_accel.plugin
print((time.perf_counter() - begin) * 1e3, "torch" in sys.modules)
"""


def _import_cost() -> tuple[float, bool]:
    """Return the milliseconds that importing the plugin adds to importing pytest, and whether it imports torch."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT], env=clean_environment({}), cwd=ROOT, capture_output=True, text=True, check=True
    )
    milliseconds, torch = done.stdout.split()
    return float(milliseconds), torch == "True"


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the time and CPU time that the plugin adds, measured alternately in sessions with and without it."""
    suite = suites.write(folder / "trivial", suites.TRIVIAL, effort.many, head="", files=100)
    results = interleaved(
        {
            "without": lambda: session(suite, [*PLUGINS, *WITHOUT]),
            "with": lambda: session(suite, [*PLUGINS, *WITH]),
        },
        effort.runs,
    )

    def median_overhead(name: str, field: str) -> Figure:
        """Return the median of the overheads of each run, compared with the run before it."""
        pairs = zip(results["with"], results["without"], strict=True)
        values = tuple((getattr(ours, field) / getattr(bare, field) - 1) * 100 for ours, bare in pairs)
        return Figure(name, middle(values), "%", 2.0, "2 %", values, _others(results["with"] + results["without"]))

    def best_overhead(name: str, field: str) -> Figure:
        """Return the overhead of the best run, compared with the best run without the plugin."""
        ours, bare = (min(getattr(run, field) for run in results[key]) for key in ("with", "without"))
        return Figure(name, (ours / bare - 1) * 100, "%", 2.0, "2 %", note=f"{ours:.2f} s, {bare:.2f} s without")

    _import_cost()  # Writes the bytecode files.
    costs = [_import_cost() for _ in range(_IMPORTS)]
    milliseconds = tuple(cost for cost, _ in costs)
    torch = sum(found for _, found in costs) + sum(run.torch for run in results["with"])
    return [
        median_overhead(f"{effort.many:,} trivial tests, added time", "wall"),
        median_overhead(f"{effort.many:,} trivial tests, added CPU time", "cpu"),
        best_overhead("added time, fastest runs", "wall"),
        best_overhead("added CPU time, runs with the least of it", "cpu"),
        Figure("importing the plugin", middle(milliseconds), "ms", 20.0, "20 ms", milliseconds),
        Figure("processes in which torch was imported", torch, "", 0.0, "none"),
    ]


def _others(runs: list[SessionTimes]) -> float:
    return max(run.others for run in runs)
