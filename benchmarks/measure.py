"""Runs a test suite in a process of its own, and says how long it took and whether the machine was quiet."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

STAMPS = "BENCHMARK_STAMPS"
"""The variable that names the file into which a suite's conftest writes its moments."""
ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ("-p", "xdist")
"""What an installation of the plugin has beside it; everything else that may be installed stays out of the figures."""
WITH = ("-p", "accel")
WITHOUT = ("-p", "no:accel")
_DISTURBED = 0.15
"""Part of the machine's CPU time that others may take before a run is repeated."""
_PATIENCE = 900


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    runs: int
    tests: int
    """In a suite whose tests cost milliseconds."""
    many: int
    """Tests of the suite that has no marks."""
    few: int
    """In a suite whose tests start processes."""


FULL = Effort(runs=5, tests=1_000, many=10_000, few=20)
QUICK = Effort(runs=1, tests=200, many=2_000, few=5)


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of the table."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    """The target, in the same unit: `value` is to be at most so much."""
    target: str = ""
    """The target in words."""
    values: tuple[float, ...] = ()
    """Those of the single runs, of which `value` is the median."""
    others: float = 0.0
    """The part of the machine's CPU time that other processes took meanwhile, at its worst."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How much of the target was used; None where there is none, and infinite where it is nothing."""
        if self.limit is None:
            return None
        return self.value / self.limit if self.limit else (0.0 if self.value == 0 else float("inf"))


@dataclass(frozen=True, slots=True)
class Run:
    """A session from its start to its end, in seconds."""

    started: float
    wall: float
    cpu: float
    """User and system time of all its processes."""
    others: float
    collecting: float
    """When collection began."""
    collected: float
    """When collection had ended."""
    begins: tuple[float, ...]
    """When each test began."""
    ends: tuple[float, ...]
    """When each test had been reported."""
    torch: bool
    """Whether the main process had torch imported at the end."""

    def per_test(self, first: int) -> float:
        """Milliseconds a test, from test `first` on: the ones before it start processes and fill caches."""
        return (self.ends[-1] - self.begins[first]) / (len(self.ends) - first) * 1e3

    def per_collected_test(self, first: int) -> float:
        """As :meth:`per_test`, with the test's part of collection.

        Ranks collect a file when they come to it, which the running time has in it: so the others' must count as well.
        """
        return self.per_test(first) + (self.collected - self.collecting) / len(self.ends) * 1e3


def torchrun(ranks: int) -> tuple[str, ...]:
    """What to give :func:`session` as its launcher, for so many ranks on this machine."""
    return ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}")


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The caller's, without what changes the figures: a session that may not write bytecode compiles every time."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONDONTWRITEBYTECODE" and not name.startswith("PYTEST_")
    }
    return {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **extra}


def session(
    folder: Path,
    arguments: Sequence[str] = (),
    *,
    python: str = sys.executable,
    extra: Mapping[str, str] | None = None,
    status: int = 0,
    launcher: Sequence[str] = (),
) -> Run:
    """Run pytest in `folder`, or have a `launcher` run it; RuntimeError if it does not end with `status`."""
    stamps = folder / "stamps.json"
    stamps.unlink(missing_ok=True)
    environment = clean_environment({STAMPS: str(stamps), **(extra or {})})
    command = [python, *launcher, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "."]
    busy, own, started = _busy(), _children(), time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
    wall = time.monotonic() - started
    cpu = _children() - own
    if done.returncode != status:
        raise RuntimeError(f"{' '.join(command)} in {folder}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    total = wall * (os.cpu_count() or 1)
    others = max(0.0, (_busy() - busy - cpu) / total)
    moments = json.loads(stamps.read_text())
    return Run(
        started,
        wall,
        cpu,
        others,
        moments["collecting"],
        moments["collected"],
        tuple(moments["begins"]),
        tuple(moments["ends"]),
        moments["torch"],
    )


def interleaved(sessions: Mapping[str, Callable[[], Run]], runs: int) -> dict[str, list[Run]]:
    """`runs` runs of each, in turns, so that a slow minute of the machine is slow for all of them."""
    made: dict[str, list[Run]] = {name: [] for name in sessions}
    for number in range(runs):
        for name, start in sessions.items():
            print(f"  {name}, run {number + 1} of {runs}", file=sys.stderr, flush=True)
            made[name].append(_quiet(start))
    return made


def middle(values: Sequence[float]) -> float:
    return float(median(values))


def load() -> str:
    """The machine and how busy it is, in a line."""
    average = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, load average {average}"


def _quiet(start: Callable[[], Run]) -> Run:
    """A run during which others left the machine alone, or the quieter of two."""
    first = start()
    if first.others <= _DISTURBED:
        return first
    return min(first, start(), key=lambda run: run.others)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _busy() -> float:
    """Seconds for which all processors of the machine together have been busy; 0 where the system does not say."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal, *_ = (int(word) for word in line.split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
