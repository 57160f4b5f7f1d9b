"""CPU time that the plugin adds to a session with one trivial test."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

from benchmarks.measure import PLUGINS, WITH, WITHOUT, Effort, Figure, clean_environment, middle

_LIMIT = 8.0
_RUNS = 30
"""Sessions for each run of the other benchmarks. One session takes a fraction of a second."""
_CONFTEST = """
    import os
    import time


    def pytest_unconfigure(config):
        if "PYTEST_XDIST_WORKER" in os.environ:
            with open("worker_seconds", "w") as file:
                file.write(str(time.process_time()))
    """


def _session(folder: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "."]
    subprocess.run(command, cwd=folder, env=clean_environment(environment), stdout=subprocess.DEVNULL, check=True)


def _of_session(folder: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    """Return the seconds of CPU time that all processes of a session use."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _session(folder, arguments, environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _of_worker(folder: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    """Return the seconds of CPU time that the xdist worker of a session uses."""
    _session(folder, arguments, environment)
    return float((folder / "worker_seconds").read_text())


_Measure = Callable[[Path, tuple[str, ...], dict[str, str]], float]
_INSTEAD = ("-p", "another_plugin")
"""A plugin without hooks. Without it, the sessions without pytest-accel would search the installed packages once less,
which pytest does for each ``-p`` of a plugin that is not blocked."""
_WAYS: dict[str, tuple[_Measure, tuple[str, ...], dict[str, str], float | None]] = {
    "one test": (_of_session, (), {}, _LIMIT),
    "one test, no bytecode written": (_of_session, (), {"PYTHONDONTWRITEBYTECODE": "1"}, _LIMIT),
    "an xdist worker with one test": (_of_worker, ("-n1",), {}, _LIMIT),
    # Without a target: here the controller looks for devices, to give the worker its mask.
    "one test with -n1, both processes": (_of_session, ("-n1",), {}, None),
}


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Measure sessions with and without the plugin, alternately."""
    folder.mkdir()
    (folder / "test_trivial.py").write_text("def test_trivial():\n    pass\n")
    (folder / "another_plugin.py").write_text("")
    (folder / "conftest.py").write_text(dedent(_CONFTEST))
    found = []
    for name, (measure, arguments, environment, limit) in _WAYS.items():
        _session(folder, (*PLUGINS, *WITH, *arguments), environment)  # Fills the caches of files.
        with_it, without = [], []
        for _ in range(effort.runs * _RUNS):
            without.append(measure(folder, (*PLUGINS, *WITHOUT, *_INSTEAD, *arguments), environment))
            with_it.append(measure(folder, (*PLUGINS, *WITH, *arguments), environment))
        # Each run in relation to the same median: the times of short processes vary more than the plugin costs.
        values = tuple((seconds / middle(without) - 1) * 100 for seconds in with_it)
        target = "" if limit is None else f"{limit:g} %"
        found.append(Figure(f"{name}, CPU time more", middle(values), "%", limit, target, values))
    return found
