"""Time to the result of the first distributed test of a session, for which the ranks are started."""

from __future__ import annotations

from pathlib import Path

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, WITHOUT, Effort, Figure, interleaved, middle, session

COLLECTION = 1.5
"""The minimum time of the collection, in seconds."""

_OTHER_FILE = f"""import time

import conftest

while time.monotonic() < conftest.began + {COLLECTION}:
    pass
"""
"""Head of a file whose import computes until this time has passed. Ranks do not run its tests."""


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the seconds from the end of the collection without the plugin to the first result with the plugin.

    They are those of a suite whose test file imports torch, and of one whose conftest does.
    """
    found: list[Figure] = []
    for where, import_torch in {"the test file": "", "a conftest": "import torch\n"}.items():
        suite = suites.write(folder / f"first-{len(found)}", suites.all_reduce('2, kind="cpu"'), 1)
        with (suite / "conftest.py").open("a") as conftest:
            conftest.write(f"\n{import_torch}began = time.monotonic()\n")
        (suite / "test_1.py").write_text(_OTHER_FILE + suites.TRIVIAL.format(number=1))
        found += _figures_of(suite, effort, where)
    return found


def _figures_of(suite: Path, effort: Effort, where: str) -> list[Figure]:
    # Without the plugin the exit status is 1, since a test that needs ranks fails.
    results = interleaved(
        {
            "without": lambda: session(suite, [*PLUGINS, *WITHOUT], status=1),
            "with": lambda: session(suite, [*PLUGINS, *WITH]),
        },
        effort.runs,
    )
    collected = middle([run.collected - run.started for run in results["without"]])
    values = tuple(run.ends[0] - run.started - collected for run in results["with"])
    others = max(run.others for run in results["with"])
    return [
        Figure(f"start of the process to end of collection, no plugin, torch in {where}", collected, "s"),
        Figure(f"first result after that, torch in {where}", middle(values), "s", 0.5, "0.5 s", values, others),
    ]
