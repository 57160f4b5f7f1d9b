"""Time of tests in warm worlds, compared with plain tests, sessions under torchrun, and `MultiProcContinuousTest`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import suites
from benchmarks.measure import (
    PLUGINS,
    WITH,
    WITHOUT,
    Effort,
    Figure,
    SessionTimes,
    clean_environment,
    interleaved,
    middle,
    session,
    torchrun,
)

FIRST = 20
"""The first measured test: the tests before it start the process group and fill allocator and caches."""


def _all_reduce_alone(folder: Path) -> float:
    """Return the milliseconds of an all-reduce, as in the tests, in two processes without pytest."""
    script = folder / "alone.py"
    script.write_text(suites.ALL_REDUCE)
    command = [sys.executable, *torchrun(2), str(script)]
    environment = clean_environment({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def sessions(folder: Path, effort: Effort, files: int) -> dict[str, Callable[[], SessionTimes]]:
    """Return functions that run the sessions to compare; each suite has its tests in this number of files."""
    # The conftest imports torch, so that the time per test does not include this import.
    write = partial(suites.write, tests=effort.tests, files=files, imported=["torch", "torch.distributed"])
    plain = write(folder / "plain", suites.PLAIN)
    two = write(folder / "two", suites.all_reduce('2, kind="cpu"'))
    four = write(folder / "four", suites.all_reduce('4, kind="cpu"'))
    bare = write(folder / "bare", suites.all_reduce(None), conftest=suites.GROUP)
    one_thread = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def without(ranks: int) -> SessionTimes:
        return session(bare, [*PLUGINS, *WITHOUT], launcher=torchrun(ranks), extra=one_thread)

    found: dict[str, Callable[[], SessionTimes]] = {
        "plain": lambda: session(plain, [*PLUGINS, *WITHOUT]),
        "two": lambda: session(two, [*PLUGINS, *WITH]),
        "two without": lambda: without(2),
        "four": lambda: session(four, [*PLUGINS, *WITH]),
        "four without": lambda: without(4),
    }
    if importlib.util.find_spec("expecttest") is not None:  # torch.testing._internal imports it.
        head, body = suites.CONTINUOUS
        module = "torch.testing._internal.common_distributed"
        continuous = suites.write(folder / "continuous", body, effort.tests, head=head, imported=[module])
        found["continuous"] = lambda: session(continuous, [*PLUGINS, *WITHOUT])
    return found


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the milliseconds per test, including the collection, in suites of ten files."""
    results = interleaved(sessions(folder, effort, 10), effort.runs)
    alone = [_all_reduce_alone(folder) for _ in range(effort.runs)]
    values = {name: [run.per_collected_test(FIRST) for run in runs] for name, runs in results.items()}
    base, ours = middle(values["plain"]), middle(values["two"])

    def figure(name: str, key: str, factor: float | None = None, reference: float = base, target: str = "") -> Figure:
        return Figure(
            name,
            middle(values[key]),
            "ms",
            limit=None if factor is None else factor * reference,
            target=target,
            values=tuple(values[key]),
            others=max(run.others for run in results[key]),
        )

    found = [
        figure("plain test with a tensor operation", "plain"),
        Figure("gloo's all-reduce alone, two processes", middle(alone), "ms", values=tuple(alone)),
        figure("two ranks, all-reduce", "two", 2.5, target="2.5 x plain"),
        figure("two sessions at the same time, without the plugin", "two without"),
        figure("four ranks, all-reduce", "four", 5.0, target="5 x plain"),
        figure("four sessions at the same time, without the plugin", "four without"),
    ]
    if "continuous" not in values:
        return [*found, Figure("MultiProcContinuousTest", float("nan"), "ms", note="not run: needs expecttest")]
    theirs = middle(values["continuous"])
    return [
        *found,
        figure("MultiProcContinuousTest, two ranks, all-reduce", "continuous"),
        Figure("two ranks, compared with MultiProcContinuousTest", ours, "ms", theirs, "theirs", tuple(values["two"])),
    ]
