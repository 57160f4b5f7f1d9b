"""Time that the fixture `launch` adds to the command that it runs."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.measure import PLUGINS, WITH, Effort, Figure, middle, session
from benchmarks.suites import CONFTEST

TARGET = 100.0
"""The highest permitted time, in milliseconds."""
_SUITE = """import json
import os
import pathlib
import subprocess
import time

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize(("launcher", "nproc", "runs"), [("python", 1, {quick}), ("torchrun", 2, {runs})])
def test_launch(launch, launcher, nproc, runs):
    pairs = []
    for _ in range(runs + 1):
        began = time.monotonic()
        command = launch("script.py", launcher=launcher, nproc=nproc).command
        between = time.monotonic()
        subprocess.run(command, env={{"OMP_NUM_THREADS": "1", **os.environ}}, capture_output=True, check=True)
        pairs.append((between - began, time.monotonic() - between))
    (HERE / f"{{launcher}}.json").write_text(json.dumps(pairs[1:]))
"""


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Measure `launch` and the same command without it, alternately in one process. The script prints one line."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "script.py").write_text("print('here')\n")
    (folder / "test_launch.py").write_text(_SUITE.format(quick=4 * effort.runs, runs=2 * effort.runs))
    run = session(folder, [*PLUGINS, *WITH])
    found = []
    for launcher in ("python", "torchrun"):
        pairs = json.loads((folder / f"{launcher}.json").read_text())
        # The time of torchrun itself varies by more than the target, so its figure has no target.
        limit = TARGET if launcher == "python" else None
        bare = tuple(other * 1e3 for _, other in pairs)
        added = tuple((ours - other) * 1e3 for ours, other in pairs)
        found += [
            Figure(f"{launcher} without launch", middle(bare), "ms", values=bare, others=run.others),
            Figure(
                "  added by launch", middle(added), "ms", limit, f"{limit:g} ms" if limit else "", added, run.others
            ),
        ]
    return found
