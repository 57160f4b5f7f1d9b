"""Tests in worlds on a Ray cluster of several nodes on this machine, compared with the same tests without a cluster."""

from __future__ import annotations

from pathlib import Path

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, Effort, Figure, Run, interleaved, middle, session, torchrun
from tests.nodes.ray_machines import RayMachines

_FIRST = 20
"""Tests before this one start the ranks and find their caches cold."""
_ONE_NODE = 2.0
_TWO_NODES = 1.5
"""Ranks on two nodes cost more than under torchrun on one machine, since another machine is reached over TCP."""
_FIRST_RESULT = 8.0


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the milliseconds per test of two ranks, on one node and on two, and the seconds to the first result."""
    imported = ["torch", "torch.distributed"]
    one = suites.write(folder / "one", suites.all_reduce("2"), effort.tests, imported=imported)
    two = suites.write(folder / "two", suites.all_reduce("2, nodes=2"), effort.tests, imported=imported)
    machines = RayMachines({})
    try:
        for _ in range(2):
            machines.add(2)
        here = [*PLUGINS, *WITH, "--accel=sim:2"]
        there = [*here, f"--accel-cluster=ray:{machines.address}"]
        loopback = {"GLOO_SOCKET_IFNAME": "lo"}
        runs = interleaved(
            {
                "here": lambda: session(one, here),
                "one node": lambda: session(one, there),
                "two nodes": lambda: session(two, there, extra=loopback),
                "torchrun": lambda: session(one, here, launcher=torchrun(2), extra=loopback),
            },
            effort.runs,
        )
    finally:
        machines.close()
    local, launched = (middle(_per_test(runs[name])) for name in ("here", "torchrun"))
    first = tuple(run.ends[0] - run.collected for run in runs["one node"])
    return [
        _figure("two ranks on this machine", runs["here"]),
        _figure("on one node of the cluster", runs["one node"], _ONE_NODE * local, f"{_ONE_NODE:g} x this machine"),
        _figure("two ranks under torchrun", runs["torchrun"]),
        _figure("on two nodes of the cluster", runs["two nodes"], _TWO_NODES * launched, f"{_TWO_NODES:g} x torchrun"),
        Figure(
            *("first result after collection, one node", middle(first), "s", _FIRST_RESULT, f"{_FIRST_RESULT:g} s"),
            first,
        ),
    ]


def _per_test(runs: list[Run]) -> tuple[float, ...]:
    return tuple(run.per_test(_FIRST) for run in runs)


def _figure(name: str, runs: list[Run], limit: float | None = None, target: str = "") -> Figure:
    values = _per_test(runs)
    return Figure(name, middle(values), "ms", limit, target, values, max(run.others for run in runs))
