"""A class of torch's ``MultiProcessTestCase``, adopted and alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, WITHOUT, Effort, Figure, Run, interleaved, middle, session

_TIMES_FASTER = 50


def _seconds(run: Run) -> float:
    """Return the seconds from the class's first test, with the start of its world, to its last."""
    return run.ends[-1] - run.begins[0]


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the seconds for the class. Alone it takes seconds per test, and is run once."""
    name = f"{effort.few} tests of MultiProcessTestCase"
    if importlib.util.find_spec("expecttest") is None:
        return [Figure(name, float("nan"), "s", note="not run: needs expecttest")]
    head, body = suites.PROCESSES
    suite = suites.write(folder / "adopted", body, effort.few, head=head)
    (alone,) = interleaved({"alone": lambda: session(suite, [*PLUGINS, *WITHOUT])}, 1)["alone"]
    adopt = ["-o", "accel_adopt=torch"]
    adopted = interleaved({"adopted": lambda: session(suite, [*PLUGINS, *WITH, *adopt])}, effort.runs)["adopted"]
    values = tuple(_seconds(run) for run in adopted)
    theirs = _seconds(alone)
    return [
        Figure(f"{name}, alone", theirs, "s", values=(theirs,), others=alone.others),
        Figure(
            f"{name}, adopted",
            middle(values),
            "s",
            theirs / _TIMES_FASTER,
            f"1/{_TIMES_FASTER} of theirs",
            values,
            max(run.others for run in adopted),
            f"{theirs / middle(values):.0f} times faster",
        ),
    ]
