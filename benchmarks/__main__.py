"""Run the benchmarks, print a table of their figures, and exit with 1 if a figure misses its target."""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks import (
    adoption,
    broker,
    cluster,
    cost,
    discovery,
    fairness,
    files,
    first,
    fresh,
    launcher,
    launching,
    makespan,
    other_tools,
    record,
    report,
    shards,
    startup,
    unused,
    warm,
)
from benchmarks.measure import FULL, QUICK, Effort, Figure, load

Measure = Callable[[Path, Effort], list[Figure]]


def leases(folder: Path, effort: Effort) -> list[Figure]:
    """Return the figures of the broker's benchmark that have a target."""
    found = broker.measure()
    return [
        Figure(key.removesuffix(", ms"), found[key], "ms" if key.endswith(", ms") else "", limit, f"{limit:g}")
        for key, limit in broker.TARGETS.items()
    ]


def table(groups: dict[str, list[Figure]]) -> str:
    """Return a table of all figures, one line for each."""
    lines = [f"{'':<58}{'measured':>14}  {'from':>9} {'to':>9}  {'target':>17}  {'of target':>10}  {'others':>6}"]
    for name, figures in groups.items():
        lines += ["", f"{name}:"]
        lines += [_line(figure) for figure in figures]
    return "\n".join(lines)


def _line(figure: Figure) -> str:
    if math.isnan(figure.value):
        return f"  {figure.name:<56}{figure.note}"
    low, high = (f"{pick(figure.values):.2f}" if figure.values else "" for pick in (min, max))
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}{' MISSED' if figure.ratio > 1 else ''}"
    others = f"{figure.others:.0%}" if figure.others else ""
    measured = f"{figure.value:.2f} {figure.unit}"
    line = f"  {figure.name:<56}{measured:>14}  {low:>9} {high:>9}  {figure.target:>17}  {ratio:<11} {others:>6}"
    return f"{line}  {figure.note}".rstrip()


def main() -> int:
    """Run the selected groups; return 1 if a figure misses its target, else 0."""
    groups: dict[str, Measure] = {
        "warm": warm.figures,
        "cost": cost.figures,
        "launcher": launcher.figures,
        "cluster": cluster.figures,
        "fresh": fresh.figures,
        "first": first.figures,
        "files": files.figures,
        "adoption": adoption.figures,
        "spawn": adoption.spawn_figures,
        "unused": unused.figures,
        "startup": startup.figures,
        "discovery": discovery.figures,
        "broker": leases,
        "launch": launching.figures,
        "makespan": makespan.figures,
        "shards": shards.figures,
        "fairness": fairness.figures,
        "record": record.figures,
        "report": report.figures,
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        choices=[*groups, "other-tools"],
        help="measure this group; may be given several times",
    )
    parser.add_argument("--quick", action="store_true", help="one run of small suites, to see that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    parser.add_argument(
        "--with-isolate",
        action="store_true",
        help="install pytest-isolate in an environment of its own, and measure it",
    )
    options = parser.parse_args()
    groups["makespan"] = partial(makespan.figures, isolate=options.with_isolate)
    groups["other-tools"] = partial(other_tools.figures, isolate=options.with_isolate)
    effort = QUICK if options.quick else FULL
    print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {load()}", flush=True)
    found: dict[str, list[Figure]] = {}
    with tempfile.TemporaryDirectory(prefix="accel-benchmarks-") as folder:
        for name in options.only or groups:
            print(f"{name} ({load()})", file=sys.stderr, flush=True)
            found[name] = groups[name](Path(folder, name), effort)
    print(table(found))
    print("\nmeasured: median of the runs; from, to: minimum and maximum of the runs; others: the largest part of the")
    print(f"machine's CPU time that other processes used during a run. At the end: {load()}")
    if options.json:
        options.json.write_text(json.dumps({name: [asdict(one) for one in many] for name, many in found.items()}))
    return int(any((one.ratio or 0) > 1 for many in found.values() for one in many))


if __name__ == "__main__":
    sys.exit(main())
