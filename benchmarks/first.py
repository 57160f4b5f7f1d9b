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
    """Return the seconds from the end of the collection without the plugin to the first result with the plugin."""
    suite = suites.write(folder / "first", suites.all_reduce('2, device="cpu"'), 1)
    with (suite / "conftest.py").open("a") as conftest:
        conftest.write("\nbegan = time.monotonic()\n")
    (suite / "test_1.py").write_text(_OTHER_FILE + suites.TRIVIAL.format(number=1))
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
        Figure("start of the process to end of collection, no plugin", collected, "s"),
        Figure("first result after that", middle(values), "s", 0.5, "0.5 s", values, others),
    ]
