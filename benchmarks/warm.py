"""Tests in warm worlds, compared with plain tests and with torch's own reused ranks."""

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
    Run,
    clean_environment,
    interleaved,
    middle,
    session,
    torchrun,
)

_FIRST = 20
"""The first measured test: in the tests before it, process group, allocator and caches are cold."""


def _all_reduce_alone(folder: Path) -> float:
    """Return the milliseconds of the tests' bodies in two processes without pytest."""
    script = folder / "alone.py"
    script.write_text(suites.ALL_REDUCE)
    command = [sys.executable, *torchrun(2), str(script)]
    environment = clean_environment({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the milliseconds per test, with collection, in suites of 1,000 tests in ten files."""
    # What a file imports is imported once, and no cost of a test.
    write = partial(suites.write, tests=effort.tests, files=10, imported=["torch", "torch.distributed"])
    plain = write(folder / "plain", suites.PLAIN)
    two = write(folder / "two", suites.all_reduce("2"))
    four = write(folder / "four", suites.all_reduce("4"))
    bare = write(folder / "bare", suites.all_reduce(None), conftest=suites.GROUP)
    one_thread = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def without(ranks: int) -> Run:
        return session(bare, [*PLUGINS, *WITHOUT], launcher=torchrun(ranks), extra=one_thread)

    sessions: dict[str, Callable[[], Run]] = {
        "plain": lambda: session(plain, [*PLUGINS, *WITHOUT]),
        "two": lambda: session(two, [*PLUGINS, *WITH]),
        "two without": lambda: without(2),
        "four": lambda: session(four, [*PLUGINS, *WITH]),
        "four without": lambda: without(4),
    }
    if importlib.util.find_spec("expecttest") is not None:  # What torch.testing._internal needs.
        head, body = suites.CONTINUOUS
        continuous = suites.write(
            folder / "continuous",
            body,
            effort.tests,
            head=head,
            imported=["torch.testing._internal.common_distributed"],
        )
        sessions["continuous"] = lambda: session(continuous, [*PLUGINS, *WITHOUT])
    made = interleaved(sessions, effort.runs)
    alone = [_all_reduce_alone(folder) for _ in range(effort.runs)]
    values = {name: [run.per_collected_test(_FIRST) for run in runs] for name, runs in made.items()}
    base, ours = middle(values["plain"]), middle(values["two"])

    def figure(name: str, key: str, factor: float | None = None, beside: float = base, words: str = "") -> Figure:
        return Figure(
            name,
            middle(values[key]),
            "ms",
            limit=None if factor is None else factor * beside,
            target=words,
            values=tuple(values[key]),
            others=max(run.others for run in made[key]),
        )

    found = [
        figure("plain test with a tensor operation", "plain"),
        Figure("gloo's all-reduce alone, two processes", middle(alone), "ms", values=tuple(alone)),
        figure("two ranks, all-reduce", "two", 2.5, words="2.5 x plain"),
        figure("two sessions side by side, without the plugin", "two without"),
        figure("four ranks, all-reduce", "four", 5.0, words="5 x plain"),
        figure("four sessions side by side, without the plugin", "four without"),
    ]
    if "continuous" not in values:
        return [*found, Figure("MultiProcContinuousTest", float("nan"), "ms", note="not run: needs expecttest")]
    theirs = middle(values["continuous"])
    return [
        *found,
        figure("MultiProcContinuousTest, two ranks, all-reduce", "continuous"),
        Figure("two ranks beside MultiProcContinuousTest", ours, "ms", theirs, "theirs", tuple(values["two"])),
    ]
