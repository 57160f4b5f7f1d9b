"""Times of tests that start their processes, adopted by the plugin and without the plugin."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, WITHOUT, Effort, Figure, SessionTimes, interleaved, middle, session

_CLASS_SPEEDUP = 50
"""The target: how many times faster the adopted class is."""
_SPAWN_SPEEDUP = 10
"""The target for spawned processes. One process imports torch in both cases, and the others only without adoption."""


def _seconds(run: SessionTimes) -> float:
    """Return the seconds from the suite's first test, with the start of its processes, to its last."""
    return run.ends[-1] - run.begins[0]


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the seconds for a class of torch's ``MultiProcessTestCase``."""
    name = f"{effort.few} tests of MultiProcessTestCase"
    if importlib.util.find_spec("expecttest") is None:
        return [Figure(name, float("nan"), "s", note="not run: needs expecttest")]
    return _compare(folder, effort, name, suites.PROCESSES, "torch", _CLASS_SPEEDUP)


def spawn_figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the seconds for tests that call ``torch.multiprocessing.spawn``."""
    return _compare(folder, effort, f"{effort.few} tests of mp.spawn", suites.SPAWNING, "spawn", _SPAWN_SPEEDUP)


def _compare(folder: Path, effort: Effort, name: str, texts: tuple[str, str], adopt: str, speedup: int) -> list[Figure]:
    """Run a suite with the head and the test `texts`; only once without the plugin, where each test takes seconds."""
    head, body = texts
    suite = suites.write(folder / "adopted", body, effort.few, head=head)
    (without,) = interleaved({"without": lambda: session(suite, [*PLUGINS, *WITHOUT])}, 1)["without"]
    options = [*PLUGINS, *WITH, "-o", f"accel_adopt={adopt}"]
    adopted = interleaved({"adopted": lambda: session(suite, options)}, effort.runs)["adopted"]
    values = tuple(_seconds(run) for run in adopted)
    theirs = _seconds(without)
    return [
        Figure(f"{name}, without the plugin", theirs, "s", values=(theirs,), others=without.others),
        Figure(
            f"{name}, adopted",
            middle(values),
            "s",
            theirs / speedup,
            f"1/{speedup} of theirs",
            values,
            max(run.others for run in adopted),
            f"{theirs / middle(values):.0f} times faster",
        ),
    ]
