"""Time and processor time of a warm test, compared with other harnesses, on the machine as it is and a busy one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import warm
from benchmarks.measure import Effort, Figure, SessionTimes, interleaved, middle
from benchmarks.warm import FIRST

_LOOPS = 4
"""Number of busy loops beside the sessions on the busy machine."""
_DRIVER = 0.75
"""The target of the driver's processor time, in milliseconds."""
_RANK = 1.15
"""The target of a rank's processor time: how many times that of a process without the plugin."""
_TARGETS = {
    "quiet": {"two without": 1.2, "four without": 1.0, "continuous": 0.8},
    f"beside {_LOOPS} busy loops": {"two without": 1.8, "continuous": 0.6},
}
"""The targets of the time: how many times that of the other sessions, by what else the machine does."""


@contextmanager
def _busy_loops() -> Iterator[None]:
    """Keep `_LOOPS` processes computing while the context lasts."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(_LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the milliseconds per test without collection, in suites of one file, with and without other load."""
    sessions = warm.sessions(folder, effort, 1)
    quiet, busy = _TARGETS
    found = _figures_of(interleaved(sessions, effort.runs), quiet)
    with _busy_loops():
        found += _figures_of(interleaved(sessions, effort.runs, busy=True), busy)
    return found


def _figures_of(results: dict[str, list[SessionTimes]], load: str) -> list[Figure]:
    """Return the figures of the sessions in `results`, during which the machine had this `load`.

    Bare sessions are those of pytest without the plugin, under torchrun.
    """
    names = {
        "plain": "a plain test",
        "two": "two ranks",
        "two without": "two bare sessions",
        "four": "four ranks",
        "four without": "four bare sessions",
        "continuous": "MultiProcContinuousTest",
    }
    times = {name: [run.per_test(FIRST) for run in runs] for name, runs in results.items()}
    others = {name: max(run.others for run in runs) for name, runs in results.items()}
    found = [
        Figure(f"{names[name]}, {load}", middle(values), "ms", values=tuple(values), others=others[name])
        for name, values in times.items()
    ]
    for reference, factor in _TARGETS[load].items():
        ours = "four" if reference.startswith("four") else "two"
        if reference in times:
            ratio = middle(times[ours]) / middle(times[reference])
            found.append(Figure(f"{names[ours]} / {names[reference]}, {load}", ratio, "", factor, f"{factor:g}"))
    driver = [run.processor_per_test(FIRST) for run in results["two"]]
    rank = [run.processor_per_test(FIRST, rank=True) for run in results["two"]]
    bare = middle([run.processor_per_test(FIRST) for run in results["two without"]])
    return [
        *found,
        Figure(f"processor time of a driver, {load}", middle(driver), "ms", _DRIVER, f"{_DRIVER:g} ms", tuple(driver)),
        Figure(f"processor time of a bare session, {load}", bare, "ms"),
        Figure(f"processor time of a rank, {load}", middle(rank), "ms", _RANK * bare, f"{_RANK:g} x bare", tuple(rank)),
    ]
