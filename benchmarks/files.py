"""Time of a suite of many files with one test each, compared with the same files under ``torchrun -m pytest``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, WITHOUT, Effort, Figure, interleaved, middle, session, torchrun

_LIMIT = 1.5
_FIRST = 20
"""The first measured test: the tests before it start the process group and fill caches."""


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the seconds of a whole session, and the milliseconds per file in a small and in a large folder."""
    many = effort.tests * 4 // 5
    few = many // 4
    write = partial(suites.write, imported=["torch", "torch.distributed"])
    marked = suites.all_reduce('2, kind="cpu"')
    large = write(folder / "large", marked, many, files=many)
    small = write(folder / "small", marked, few, files=few)
    bare = write(folder / "bare", suites.all_reduce(None), many, files=many, conftest=suites.GROUP)
    loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    results = interleaved(
        {
            "torchrun": lambda: session(bare, [*PLUGINS, *WITHOUT], launcher=torchrun(2), extra=loopback),
            "large": lambda: session(large, [*PLUGINS, *WITH], extra=loopback),
            "small": lambda: session(small, [*PLUGINS, *WITH], extra=loopback),
        },
        effort.runs,
    )
    others = {name: max(run.others for run in runs) for name, runs in results.items()}
    seconds = {name: tuple(run.wall for run in runs) for name, runs in results.items()}
    per_file = {name: tuple(run.per_collected_test(_FIRST) for run in runs) for name, runs in results.items()}

    def figure(
        name: str, unit: str, values: dict[str, tuple[float, ...]], key: str, reference: str = "", target: str = ""
    ) -> Figure:
        limit = _LIMIT * middle(values[reference]) if reference else None
        return Figure(name, middle(values[key]), unit, limit, target, values[key], others[key])

    return [
        figure(f"{many} files under torchrun, without the plugin", "s", seconds, "torchrun"),
        figure(f"{many} files, two ranks", "s", seconds, "large", "torchrun", f"{_LIMIT:g} x torchrun"),
        figure(f"a file, two ranks, of {few} in the folder", "ms", per_file, "small"),
        figure(
            f"a file, two ranks, of {many} in the folder", "ms", per_file, "large", "small", f"{_LIMIT:g} x of {few}"
        ),
    ]
