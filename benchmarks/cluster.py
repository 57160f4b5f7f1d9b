"""Tests in worlds on a Ray cluster, compared with the same tests without a cluster."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import suites
from benchmarks.measure import PLUGINS, WITH, Effort, Figure, SessionTimes, interleaved, middle, session, torchrun
from pytest_accel import read_record
from tests import machines
from tests.features.launchers.test_several_machines import torchrun as torchrun_on_both
from tests.features.ray.ray_machines import RayMachines, StartedNode, start_node

_FIRST = 20
"""The first measured test: the tests before it start the ranks and fill caches."""
_ONE_NODE = 2.0
"""The target: time per test as a multiple of that without a cluster."""
_TWO_NODES = 1.5
"""The target: time per test as a multiple of that under torchrun on one machine. The second node costs more, since it
is reached over TCP."""
_TWO_MACHINES = 1.2
"""The target: time per test as a multiple of that under torchrun, which uses the same connections between the machines.

The medians of four equal sessions differ by up to a fifth."""
_RUNS_ON_TWO = 4
_FIRST_RESULT = 8.0  # seconds
_IMPORTED = ["torch", "torch.distributed"]
_PORT = 6379
_NODES, _DEVICES = 4, 8
_MIXED_TESTS = 500
_MAKESPAN = 1.10
_MIXED = """
import time

import pytest

TESTS = {tests}


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(seconds, marks=pytest.mark.devices(devices)) for devices, seconds in TESTS],
    ids=range(len(TESTS)),
)
def test_holds(seconds):
    time.sleep(seconds)
"""


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the milliseconds per test on nodes and on machines, and the duration of a session with many tests."""
    if importlib.util.find_spec("ray") is None:
        return [Figure("worlds on a Ray cluster", float("nan"), "ms", note="not run: needs ray")]
    return [
        *_on_this_machine(folder, effort),
        *_on_two_machines(effort),
        *_makespan(folder / "mixed"),
    ]


def _on_this_machine(folder: Path, effort: Effort) -> list[Figure]:
    """Return the milliseconds per test of two ranks, on one node and on two, and the seconds to the first result."""
    one = suites.write(folder / "one", suites.all_reduce("2"), effort.tests, imported=_IMPORTED)
    two = suites.write(folder / "two", suites.all_reduce("2, nodes=2"), effort.tests, imported=_IMPORTED)
    cluster = RayMachines({})
    try:
        for _ in range(2):
            cluster.add(2)
        local_arguments = [*PLUGINS, *WITH, "--accel=sim:2"]
        cluster_arguments = [*local_arguments, f"--accel-cluster=ray:{cluster.address}"]
        launched_arguments = [*local_arguments, "--accel-launcher=on"]
        loopback = {"GLOO_SOCKET_IFNAME": "lo"}
        runs = interleaved(
            {
                "here": lambda: session(one, local_arguments),
                "one node": lambda: session(one, cluster_arguments),
                "two nodes": lambda: session(two, cluster_arguments, extra=loopback),
                "torchrun": lambda: session(one, launched_arguments, launcher=torchrun(2), extra=loopback),
            },
            effort.runs,
        )
    finally:
        cluster.close()
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


def _on_two_machines(effort: Effort) -> list[Figure]:
    """Return the milliseconds per test of two ranks, each in its own network namespace; nothing without root."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Ray's sockets need a short path.
    suite = suites.write(folder / "two", suites.all_reduce('2, nodes=2, kind="cpu"'), effort.tests, imported=_IMPORTED)
    nodes: list[StartedNode] = []
    arguments = [*PLUGINS, *WITH, "--accel=none"]
    head = f"{machines.ADDRESSES[0]}:{_PORT}"
    try:
        with machines.machines(folder) as two:
            try:
                head_options = ("--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={folder}/ray")
                for number, options in enumerate((head_options, (f"--address={head}",))):
                    environment = {**os.environ, "RAY_TMPDIR": str(folder / str(number))}
                    prefix = two.on(number, private=("/dev/shm",) if number else ())
                    address = machines.ADDRESSES[number]
                    nodes.append(start_node(folder, address, number, environment, (*options, "--num-gpus=0"), prefix))
                    nodes[-1].wait_ready()
                program = (*two.on(0), sys.executable, "-m", "pytest")
                runs = interleaved(
                    {
                        "torchrun": lambda: session(
                            suite, [*arguments, "--accel-launcher=on"], program=torchrun_on_both(two, 1)
                        ),
                        "ray": lambda: session(suite, [*arguments, f"--accel-cluster=ray:{head}"], program=program),
                    },
                    max(_RUNS_ON_TWO, effort.runs),
                )
            finally:
                for node in reversed(nodes):
                    node.kill()
    except pytest.skip.Exception as reason:
        print(f"  two machines: {reason}", file=sys.stderr)
        return []
    finally:
        shutil.rmtree(folder)
    limit = _TWO_MACHINES * middle(_per_test(runs["torchrun"]))
    return [
        _figure("two machines, under torchrun", runs["torchrun"]),
        _figure("the same on the cluster", runs["ray"], limit, f"{_TWO_MACHINES:g} x torchrun"),
    ]


def _makespan(folder: Path) -> list[Figure]:
    """Return the duration of a session with 500 tests on four nodes, as a multiple of the lower bound."""
    draw = random.Random(7)
    tests = [(draw.choice((1, 1, 1, 1, 2, 2, 4, 8)), round(draw.uniform(1, 6), 3)) for _ in range(_MIXED_TESTS)]
    bound = sum(devices * seconds for devices, seconds in tests) / (_NODES * _DEVICES)
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text(suites.CONFTEST)
    (folder / "test_holds.py").write_text(_MIXED.format(tests=tests))
    (folder / "pytest.ini").write_text(f"[pytest]\naccel = sim:{_DEVICES}\n")
    cluster = RayMachines({})
    try:
        for _ in range(_NODES):
            cluster.add(_DEVICES)
        arguments = [
            *(*PLUGINS, *WITH, f"-n{_NODES * _DEVICES}", f"--accel-cluster=ray:{cluster.address}"),
            *("--accel-durations=durations.json", "--accel-record=record.jsonl"),
        ]
        ratios = [_ratio(folder, arguments, bound) for _ in range(2)]
    finally:
        cluster.close()
    name = f"{_MIXED_TESTS} tests on {_NODES} nodes with {_DEVICES} devices"
    return [
        Figure(f"{name}: {which}", ratio, "x", _MAKESPAN, f"{_MAKESPAN:g} x lower bound")
        for which, ratio in zip(("durations unknown", "durations known"), ratios, strict=True)
    ]


def _ratio(folder: Path, arguments: Sequence[str], bound: float) -> float:
    """Run a session; return the time from the start of its first test to the end of its last, divided by `bound`."""
    session(folder, arguments)
    record = folder / "record.jsonl"
    phases = [event for event in read_record(record) if event.event == "PhaseReported"]
    record.unlink()
    return (max(phase.stop for phase in phases) - min(phase.start for phase in phases)) / bound


def _per_test(runs: list[SessionTimes]) -> tuple[float, ...]:
    return tuple(run.per_test(_FIRST) for run in runs)


def _figure(name: str, runs: list[SessionTimes], limit: float | None = None, target: str = "") -> Figure:
    values = _per_test(runs)
    return Figure(name, middle(values), "ms", limit, target, values, max(run.others for run in runs))
