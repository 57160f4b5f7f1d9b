"""Functions that run a session of pytest in a new process, and measure its time and the load of the machine."""

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
"""The environment variable with the path of the file to which a suite's conftest writes the measured times."""
ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ("-p", "xdist")
"""Options that load the plugin on which pytest-accel depends. No other installed plugin is loaded, since that could
affect the figures."""
WITH = ("-p", "accel")
"""Options of a session with pytest-accel."""
WITHOUT = ("-p", "no:accel")
"""Options of a session without pytest-accel."""
_DISTURBED = 0.15
"""Part of the machine's CPU time that other processes may use. A run is repeated if they use more."""
_TIMEOUT = 900  # seconds


@dataclass(frozen=True, slots=True)
class Effort:
    """The numbers of runs and tests in all benchmarks."""

    runs: int
    tests: int
    """Tests of a suite whose tests take milliseconds."""
    many: int
    """Tests of the suite without marks."""
    few: int
    """Tests of a suite whose tests start processes."""


FULL = Effort(runs=5, tests=1_000, many=10_000, few=20)
QUICK = Effort(runs=1, tests=200, many=2_000, few=5)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    """The target: the highest permitted `value`, in the same unit."""
    target: str = ""
    """The target in words."""
    values: tuple[float, ...] = ()
    """The values of all runs; `value` is their median."""
    others: float = 0.0
    """The part of the machine's CPU time that other processes used: the maximum over the runs."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The value divided by the target; None without a target, infinite if the target is 0 and the value is not."""
        if self.limit is None:
            return None
        return self.value / self.limit if self.limit else (0.0 if self.value == 0 else float("inf"))


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """The times of one session, in seconds."""

    started: float
    wall: float
    cpu: float
    """User and system time of all processes of the session."""
    others: float
    collecting: float
    """Start of the collection."""
    collected: float
    """End of the collection."""
    begins: tuple[float, ...]
    """Start of each test."""
    ends: tuple[float, ...]
    """Time of the last report of each test."""
    processor: tuple[float, ...]
    """Processor time of the main process at the end of each test."""
    rank_processor: tuple[float, ...]
    """The same of rank 0; empty without ranks."""
    torch: bool
    """True if the main process had imported torch at the end."""

    def per_test(self, first: int) -> float:
        """Return the milliseconds per test, from test `first` on: earlier tests start processes and fill caches."""
        return (self.ends[-1] - self.begins[first]) / (len(self.ends) - first) * 1e3

    def processor_per_test(self, first: int, *, rank: bool = False) -> float:
        """Return the milliseconds of processor time per test, from test `first` on, of the main process or rank 0."""
        times = self.rank_processor if rank else self.processor
        return (times[-1] - times[first]) / (len(times) - 1 - first) * 1e3

    def per_collected_test(self, first: int) -> float:
        """Return :meth:`per_test` plus the test's part of the collection.

        Ranks collect a file during the run, so their time contains it: the collection of other sessions must count too.
        """
        return self.per_test(first) + (self.collected - self.collecting) / len(self.ends) * 1e3


def torchrun(ranks: int) -> tuple[str, ...]:
    """Return the argument `launcher` of :func:`session` for `ranks` ranks on this machine."""
    return ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}")


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with `extra`, and without variables that affect the figures: pytest's, and the one that
    disables bytecode files."""
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
    program: Sequence[str] = (),
) -> SessionTimes:
    """Run pytest in `folder`, under `launcher` if it is given.

    Raise RuntimeError if it does not exit with `status`, or skips a test. `program` replaces ``python -m pytest`` and
    `launcher` at the start of the command.
    """
    stamps = folder / "stamps.json"
    rank_stamps = folder / "stamps.json.0"
    for path in (stamps, rank_stamps):
        path.unlink(missing_ok=True)
    environment = clean_environment({STAMPS: str(stamps), **(extra or {})})
    begin = program or (python, *launcher, "-m", "pytest")
    command = [*begin, "-q", "-p", "no:cacheprovider", *arguments, "."]
    busy, own, started = _machine_cpu_time(), _children_cpu_time(), time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False
    )
    wall = time.monotonic() - started
    cpu = _children_cpu_time() - own
    if done.returncode != status:
        raise RuntimeError(f"{' '.join(command)} in {folder}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    total = wall * (os.cpu_count() or 1)
    others = max(0.0, (_machine_cpu_time() - busy - cpu) / total)
    moments = json.loads(stamps.read_text())
    if moments["skipped"]:
        raise RuntimeError(f"{' '.join(command)} in {folder}: a skipped test has no time: {moments['skipped'][0]}")
    return SessionTimes(
        started,
        wall,
        cpu,
        others,
        moments["collecting"],
        moments["collected"],
        tuple(moments["begins"]),
        tuple(moments["ends"]),
        tuple(moments["processor"]),
        tuple(json.loads(rank_stamps.read_text())["processor"]) if rank_stamps.exists() else (),
        moments["torch"],
    )


def interleaved(
    sessions: Mapping[str, Callable[[], SessionTimes]], runs: int, *, busy: bool = False
) -> dict[str, list[SessionTimes]]:
    """Run each session `runs` times, alternately, so that a slow phase of the machine affects all of them.

    A session that other processes have disturbed is repeated, unless the machine is `busy` on purpose.
    """
    results: dict[str, list[SessionTimes]] = {name: [] for name in sessions}
    for number in range(runs):
        for name, start in sessions.items():
            print(f"  {name}, run {number + 1} of {runs}", file=sys.stderr, flush=True)
            results[name].append(start() if busy else _quiet(start))
    return results


def middle(values: Sequence[float]) -> float:
    """Return the median as a float."""
    return float(median(values))


def load() -> str:
    """Return the machine's cores and load as one line."""
    average = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, load average {average}"


def _quiet(start: Callable[[], SessionTimes]) -> SessionTimes:
    """Return a run during which other processes used little CPU time, or the better of two runs."""
    first = start()
    if first.others <= _DISTURBED:
        return first
    return min(first, start(), key=lambda run: run.others)


def _children_cpu_time() -> float:
    """Return the CPU seconds that ended child processes have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _machine_cpu_time() -> float:
    """Return the CPU seconds that all processes of the machine have used; 0 if the system does not report them."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal, *_ = (int(word) for word in line.split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
