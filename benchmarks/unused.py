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
    Run,
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
    """Measure sessions with and without the plugin, alternately: elapsed time and CPU time of the process."""
    suite = suites.write(folder / "trivial", suites.TRIVIAL, effort.many, head="", files=100)
    made = interleaved(
        {
            "without": lambda: session(suite, [*PLUGINS, *WITHOUT]),
            "with": lambda: session(suite, [*PLUGINS, *WITH]),
        },
        effort.runs,
    )

    def more(name: str, pick: str) -> Figure:
        """Return the ratio of each run to the one before it."""
        pairs = zip(made["with"], made["without"], strict=True)
        values = tuple((getattr(ours, pick) / getattr(bare, pick) - 1) * 100 for ours, bare in pairs)
        return Figure(name, middle(values), "%", 2.0, "2 %", values, _others(made["with"] + made["without"]))

    def least(name: str, pick: str) -> Figure:
        ours, bare = (min(getattr(run, pick) for run in made[key]) for key in ("with", "without"))
        return Figure(name, (ours / bare - 1) * 100, "%", 2.0, "2 %", note=f"{ours:.2f} s against {bare:.2f} s")

    _import_cost()  # Writes the bytecode.
    costs = [_import_cost() for _ in range(_IMPORTS)]
    milliseconds = tuple(cost for cost, _ in costs)
    torch = sum(found for _, found in costs) + sum(run.torch for run in made["with"])
    return [
        more(f"{effort.many:,} trivial tests, time more than without", "wall"),
        more(f"{effort.many:,} trivial tests, CPU time more than without", "cpu"),
        least("the same, fastest run of each", "wall"),
        least("the same, least CPU time of each", "cpu"),
        Figure("importing the plugin", middle(milliseconds), "ms", 20.0, "20 ms", milliseconds),
        Figure("processes in which torch was imported", torch, "", 0.0, "none"),
    ]


def _others(runs: list[Run]) -> float:
    return max(run.others for run in runs)
