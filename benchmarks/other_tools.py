"""Time of tests in other tools that run a test in separate processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, WITHOUT, Effort, Figure, SessionTimes, interleaved, middle, session

PACKAGES = ("pytest==9.1.1", "pytest-isolate==0.0.17")
"""Packages to install for pytest-isolate, which fails every test under pytest 9.2."""
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "pytest-accel-benchmarks"
_SLOW_TESTS = 3
"""Number of tests in a suite whose tests take seconds."""


def isolate_python() -> str:
    """Return an interpreter that has pytest-isolate, a pytest that it supports, and the torch of this interpreter.

    Raise subprocess.CalledProcessError if pip cannot install them.
    """
    home = _CACHE / f"isolate-{sys.version_info.major}.{sys.version_info.minor}"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True, capture_output=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True, capture_output=True)
        query = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.run([str(python), "-c", query], check=True, capture_output=True, text=True).stdout.strip()
        # A .pth file appends the folder to the path, so pytest is imported from the new environment.
        Path(site, "torch-of-the-caller.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (home / "ready").touch()
    return str(python)


def _figure(name: str, runs: list[SessionTimes], first: int = 0, note: str = "") -> Figure:
    values = tuple(run.per_test(first) for run in runs)
    return Figure(name, middle(values), "ms", values=values, others=max(run.others for run in runs), note=note)


def figures(folder: Path, effort: Effort, *, isolate: bool) -> list[Figure]:
    """Return the milliseconds per test of each tool, and of two ranks in comparison."""
    runs = max(1, effort.runs // 2)
    two = suites.write(folder / "two", suites.all_reduce('2, kind="cpu"'), effort.tests, files=10)
    sessions = {"two": lambda: session(two, [*PLUGINS, *WITH])}
    head, body = suites.TORCHRUN
    torchrun = suites.write(folder / "torchrun", body, _SLOW_TESTS, head=head)
    sessions["torchrun"] = lambda: session(torchrun, [*PLUGINS, *WITHOUT])
    if importlib.util.find_spec("expecttest") is not None:
        head, body = suites.PROCESSES
        processes = suites.write(folder / "processes", body, _SLOW_TESTS, head=head)
        sessions["processes"] = lambda: session(processes, [*PLUGINS, *WITHOUT])
    results = interleaved(sessions, runs)
    ours = [run.per_test(20) for run in results["two"]]
    found = [_figure("torchrun in each test, two ranks", results["torchrun"])]
    if "processes" in results:
        theirs = _figure("MultiProcessTestCase, two ranks", results["processes"])
        found += [
            theirs,
            Figure(
                "two ranks, compared with MultiProcessTestCase",
                middle(ours),
                "ms",
                theirs.value / 500,
                "1/500 of theirs",
                tuple(ours),
                max(run.others for run in results["two"]),
            ),
        ]
    else:
        found.append(Figure("MultiProcessTestCase", float("nan"), "ms", note="not run: needs expecttest"))
    if isolate:
        found.append(_isolate(folder, effort, runs))
    return found


def _isolate(folder: Path, effort: Effort, runs: int) -> Figure:
    name = "pytest-isolate, one forked process and no group"
    try:
        python = isolate_python()
    except subprocess.CalledProcessError as error:
        return Figure(name, float("nan"), "ms", note=f"not run: {' '.join(error.cmd[-3:])} failed")
    suite = suites.write(folder / "isolate", suites.PLAIN, effort.few)
    arguments = ["-p", "pytest_isolate", "--isolate"]
    results = interleaved({"isolate": lambda: session(suite, arguments, python=python)}, runs)
    return _figure(name, results["isolate"], 1, note=PACKAGES[0])
