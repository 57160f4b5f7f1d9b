"""Time of tests under ``torchrun -m pytest``, compared with the same tests in a session without a launcher."""

from __future__ import annotations

from pathlib import Path

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, Effort, Figure, interleaved, middle, session, torchrun

_TESTS = 50
_FIRST = 5
"""The first measured test: the tests before it start the ranks and fill caches."""
_LIMIT = 1.5


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the milliseconds per test of two ranks, including the collection."""
    suite = suites.write(
        folder / "two", suites.all_reduce('2, kind="cpu"'), _TESTS, imported=["torch", "torch.distributed"]
    )
    arguments = [*PLUGINS, *WITH]
    results = interleaved(
        {
            "warm": lambda: session(suite, arguments),
            "launched": lambda: session(
                suite, [*arguments, "--accel-launcher=on"], launcher=torchrun(2), extra={"GLOO_SOCKET_IFNAME": "lo"}
            ),
        },
        effort.runs,
    )
    values = {name: tuple(run.per_collected_test(_FIRST) for run in runs) for name, runs in results.items()}
    others = {name: max(run.others for run in runs) for name, runs in results.items()}
    warm, launched = (middle(values[name]) for name in ("warm", "launched"))
    return [
        Figure("two ranks, all-reduce, 50 tests", warm, "ms", values=values["warm"], others=others["warm"]),
        Figure(
            *("the same under torchrun", launched, "ms", _LIMIT * warm, f"{_LIMIT:g} x warm", values["launched"]),
            others=others["launched"],
        ),
    ]
