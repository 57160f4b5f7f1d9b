"""CPU time that the plugin adds to a session with one trivial test."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import PLUGINS, WITH, WITHOUT, Effort, Figure, clean_environment, middle

_LIMIT = 8.0
_RUNS = 20
"""Sessions for each run of the other benchmarks. One session takes a fraction of a second."""
_WAYS = {
    "one test": ((), {}),
    "one test, no bytecode written": ((), {"PYTHONDONTWRITEBYTECODE": "1"}),
    "one test in an xdist worker": (("-n1",), {}),
}


def _cpu_time(folder: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    """Return the seconds of CPU time that a session and its workers use."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "."]
    subprocess.run(command, cwd=folder, env=clean_environment(environment), stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Measure sessions with and without the plugin, alternately."""
    folder.mkdir()
    (folder / "test_trivial.py").write_text("def test_trivial():\n    pass\n")
    found = []
    for name, (arguments, environment) in _WAYS.items():
        ratios = []
        _cpu_time(folder, (*PLUGINS, *WITH, *arguments), environment)  # Fills the caches of files.
        for _ in range(effort.runs * _RUNS):
            without = _cpu_time(folder, (*PLUGINS, *WITHOUT, *arguments), environment)
            ratios.append((_cpu_time(folder, (*PLUGINS, *WITH, *arguments), environment) / without - 1) * 100)
        values = tuple(ratios)
        found.append(Figure(f"{name}, CPU time more", middle(values), "%", _LIMIT, f"{_LIMIT:g} %", values))
    return found
