"""Time of tests that require new processes (``fresh=True``)."""

from __future__ import annotations

from pathlib import Path

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, Effort, Figure, SessionTimes, interleaved, middle, session

_SLOW = "slow_to_import"
_FIRST = 1
"""The first measured test."""


def _package(folder: Path) -> Path:
    """Write a package whose import takes two seconds, with the metadata of an installed one."""
    site = folder / "site-packages"
    (site / _SLOW).mkdir(parents=True)
    (site / _SLOW / "__init__.py").write_text("import time\n\ntime.sleep(2)\n")
    return site


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the milliseconds per test, from the second test on.

    The setting `accel_preload` names the slow package, as a session without it advises: otherwise each rank imports it.
    """
    site = _package(folder)
    body = suites.all_reduce('2, fresh=True, kind="cpu"')
    light = suites.write(folder / "light", body, effort.few)
    heavy = suites.write(folder / "heavy", body, effort.few, head=suites.IMPORTS + f"import {_SLOW}\n")
    results = interleaved(
        {
            "light": lambda: session(light, [*PLUGINS, *WITH]),
            "heavy": lambda: session(
                heavy, [*PLUGINS, *WITH, "-o", f"accel_preload={_SLOW}"], extra={"PYTHONPATH": str(site)}
            ),
        },
        effort.runs,
    )

    def figure(name: str, runs: list[SessionTimes], limit: float) -> Figure:
        values = tuple(run.per_test(_FIRST) for run in runs)
        others = max(run.others for run in runs)
        return Figure(name, middle(values), "ms", limit, f"{limit:g} ms", values, others)

    return [
        figure("fresh=True, two ranks with a group", results["light"], 150),
        figure("fresh=True, a package of 2 s in accel_preload", results["heavy"], 250),
    ]
