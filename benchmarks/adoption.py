"""Time of a class of torch's ``MultiProcessTestCase``, adopted by the plugin and without the plugin."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, WITHOUT, Effort, Figure, SessionTimes, interleaved, middle, session

_SPEEDUP = 50
"""The target: how many times faster the adopted class is."""


def _seconds(run: SessionTimes) -> float:
    """Return the seconds from the class's first test, with the start of its world, to its last."""
    return run.ends[-1] - run.begins[0]


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the seconds for the class. It runs only once without the plugin, where each test takes seconds."""
    name = f"{effort.few} tests of MultiProcessTestCase"
    if importlib.util.find_spec("expecttest") is None:
        return [Figure(name, float("nan"), "s", note="not run: needs expecttest")]
    head, body = suites.PROCESSES
    suite = suites.write(folder / "adopted", body, effort.few, head=head)
    (without,) = interleaved({"without": lambda: session(suite, [*PLUGINS, *WITHOUT])}, 1)["without"]
    adopt = ["-o", "accel_adopt=torch"]
    adopted = interleaved({"adopted": lambda: session(suite, [*PLUGINS, *WITH, *adopt])}, effort.runs)["adopted"]
    values = tuple(_seconds(run) for run in adopted)
    theirs = _seconds(without)
    return [
        Figure(f"{name}, without the plugin", theirs, "s", values=(theirs,), others=without.others),
        Figure(
            f"{name}, adopted",
            middle(values),
            "s",
            theirs / _SPEEDUP,
            f"1/{_SPEEDUP} of theirs",
            values,
            max(run.others for run in adopted),
            f"{theirs / middle(values):.0f} times faster",
        ),
    ]
