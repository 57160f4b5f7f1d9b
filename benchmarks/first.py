"""The first distributed test of a session, whose processes have to be started."""

from __future__ import annotations

from pathlib import Path

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, WITHOUT, Effort, Figure, interleaved, middle, session

COLLECTION = 1.5
"""Seconds that collection takes at least."""

_OTHER_FILE = f"""import time

import conftest

while time.monotonic() < conftest.began + {COLLECTION}:
    pass
"""
"""A file whose import computes until that time is over. The ranks do not run its tests."""


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the seconds from the end of a collection without the plugin to the first result with it."""
    suite = suites.write(folder / "first", suites.all_reduce("2"), 1)
    with (suite / "conftest.py").open("a") as conftest:
        conftest.write("\nbegan = time.monotonic()\n")
    (suite / "test_1.py").write_text(_OTHER_FILE + suites.TRIVIAL.format(number=1))
    # A test that needs ranks cannot run without the plugin: status 1.
    made = interleaved(
        {
            "without": lambda: session(suite, [*PLUGINS, *WITHOUT], status=1),
            "with": lambda: session(suite, [*PLUGINS, *WITH]),
        },
        effort.runs,
    )
    collected = middle([run.collected - run.started for run in made["without"]])
    values = tuple(run.ends[0] - run.started - collected for run in made["with"])
    others = max(run.others for run in made["with"])
    return [
        Figure("collection without the plugin, since the process began", collected, "s"),
        Figure("first result after that", middle(values), "s", 0.5, "0.5 s", values, others),
    ]
