"""CPU time that the plugin adds to a session with one trivial test."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

from benchmarks.measure import PLUGINS, WITH, WITHOUT, Effort, Figure, clean_environment, middle

_LIMIT = 8.0  # percent
_RUNS = 8
"""Number of sessions in place of one run of another benchmark: a session takes only a fraction of a second."""
_CONFTEST = """
    import os
    import time


    def pytest_unconfigure(config):
        if "PYTEST_XDIST_WORKER" in os.environ:
            with open("worker_seconds", "w") as file:
                file.write(str(time.process_time()))
    """


def _run_session(folder: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    """Run pytest in `folder`; raise subprocess.CalledProcessError if it fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "."]
    subprocess.run(command, cwd=folder, env=clean_environment(environment), stdout=subprocess.DEVNULL, check=True)


def _session_cpu_time(folder: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    """Return the seconds of CPU time that all processes of a session use."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run_session(folder, arguments, environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _worker_cpu_time(folder: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    """Return the seconds of CPU time that the xdist worker of a session uses."""
    _run_session(folder, arguments, environment)
    return float((folder / "worker_seconds").read_text())


_Measure = Callable[[Path, tuple[str, ...], dict[str, str]], float]
_PLACEHOLDER = ("-p", "another_plugin")
"""Options that load a plugin without hooks. pytest searches the installed packages for each ``-p`` of a plugin that is
not blocked, so sessions with and without pytest-accel search equally often."""
_CASES: dict[str, tuple[_Measure, tuple[str, ...], dict[str, str], float | None]] = {
    "one test": (_session_cpu_time, (), {}, _LIMIT),
    "one test, no bytecode written": (_session_cpu_time, (), {"PYTHONDONTWRITEBYTECODE": "1"}, _LIMIT),
    "an xdist worker with one test": (_worker_cpu_time, ("-n1",), {}, _LIMIT),
    # Has no target: the controller discovers devices to set the mask of the worker.
    "one test with -n1, both processes": (_session_cpu_time, ("-n1",), {}, None),
}


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the CPU time that the plugin adds, measured alternately in sessions with and without it."""
    folder.mkdir()
    (folder / "test_trivial.py").write_text("def test_trivial():\n    pass\n")
    (folder / "another_plugin.py").write_text("")
    (folder / "conftest.py").write_text(dedent(_CONFTEST))
    found = []
    for name, (measure, arguments, environment, limit) in _CASES.items():
        _run_session(folder, (*PLUGINS, *WITH, *arguments), environment)  # Fills the file caches.
        with_it, without = [], []
        for _ in range(effort.runs * _RUNS):
            without.append(measure(folder, (*PLUGINS, *WITHOUT, *_PLACEHOLDER, *arguments), environment))
            with_it.append(measure(folder, (*PLUGINS, *WITH, *arguments), environment))
        # All runs are compared with one median, since the times of short processes vary more than the plugin costs.
        values = tuple((seconds / middle(without) - 1) * 100 for seconds in with_it)
        target = "" if limit is None else f"{limit:g} %"
        found.append(Figure(f"{name}, added CPU time", middle(values), "%", limit, target, values))
    return found
