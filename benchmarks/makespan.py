"""Duration of sessions of mixed tests on eight devices, for several schedulers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks.measure import ROOT, Effort, Figure
from benchmarks.other_tools import isolate_python
from benchmarks.virtual import Test, UniformMachine, Worker
from pytest_accel.features.order.scheduler import RunOrder
from pytest_accel.features.order.tasks import Task
from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import decide

DEVICES = 8
WORKERS = 16
"""Two workers for each device: half of them run tests without a device."""
SEEDS = 20
_AGREEMENT = 0.05
"""The part by which a real session may take longer than the simulated one."""
_REAL_TESTS = 48


def many_small(draw: random.Random) -> list[Test]:
    tests = [Test(draw.uniform(0.5, 3), module=number // 10) for number in range(150)]
    tests += [Test(draw.uniform(1, 6), 1, module=20 + number // 10) for number in range(150)]
    tests += [Test(draw.uniform(5, 15), draw.choice((4, 8)), module=40) for _ in range(10)]
    draw.shuffle(tests)
    return tests


def large_last(draw: random.Random) -> list[Test]:
    tests = [Test(draw.uniform(0.5, 3), module=number // 10) for number in range(100)]
    tests += [Test(draw.uniform(1, 6), 1, module=20 + number // 10) for number in range(100)]
    tests += [Test(draw.uniform(2, 10), 2, module=30) for _ in range(20)]
    tests += [Test(draw.uniform(4, 12), 4, module=31) for _ in range(12)]
    return tests + [Test(draw.uniform(5, 15), 8, module=32) for _ in range(8)]


def heavy_tailed(draw: random.Random) -> list[Test]:
    tests = []
    for number in range(200):
        seconds = min(60.0, 0.5 * draw.paretovariate(1.2))
        tests.append(Test(seconds, draw.choice((0, 1, 1, 1, 2, 2, 4, 8)), module=number // 10))
    return tests


def three_devices_each(draw: random.Random) -> list[Test]:
    return [Test(draw.uniform(1, 8), 3, module=number // 10) for number in range(120)]


def half_shared(draw: random.Random) -> list[Test]:
    tests = [Test(draw.uniform(1, 6), 1, 0.5, module=number // 10) for number in range(120)]
    tests += [Test(draw.uniform(1, 6), draw.choice((1, 2, 4)), module=20 + number // 10) for number in range(60)]
    draw.shuffle(tests)
    return tests


def mixed(draw: random.Random) -> list[Test]:
    return [
        Test(draw.uniform(0.2, 8), draw.choice((0, 0, 1, 1, 1, 2, 2, 3, 4, 8)), module=number // 8)
        for number in range(250)
    ]


_EXAMPLES = (
    *(
        (4, 1.14),
        (2, 1.16),
        (2, 0.17),
        (2, 0.035),
        (2, 0.34),
        (2, 0.0028),
        (1, 0.15),
        (2, 0.029),
        (4, 0.056),
        (2, 0.0098),
    ),
    *((2, 0.62), (4, 0.54)),
)
"""Devices and seconds of the tests in `examples/`, file by file: the shorter of the times that two sessions with one
worker recorded on ``sim:8`` (`accel/durations` in pytest's cache)."""


def like_the_examples(draw: random.Random) -> list[Test]:
    """Return the tests of twenty suites like the examples, each as slow as on a machine of different speed."""
    tests = []
    for suite in range(20):
        slowness = draw.uniform(0.5, 2)
        tests += [Test(seconds * slowness, devices, module=suite) for devices, seconds in _EXAMPLES]
    return tests


MIXES: dict[str, Callable[[random.Random], list[Test]]] = {
    "many small, few large": many_small,
    "large ones collected last": large_last,
    "heavy-tailed": heavy_tailed,
    "3 devices each": three_devices_each,
    "half of them shared": half_shared,
    "everything": mixed,
    "like the examples": like_the_examples,
}


def accel_scheduler(machine: UniformMachine, expected: Sequence[float | None]) -> RunOrder:
    """Return the plugin's scheduler for the tests of `machine`, whose `expected` seconds are None if unknown."""
    needs = {(test.devices, test.share): test.need(machine.devices) for test in machine.tests}
    tasks = [
        Task(nodeid, needs[test.devices, test.share], seconds)
        for nodeid, test, seconds in zip(machine.collection, machine.tests, expected, strict=True)
    ]
    return RunOrder(tasks, len(machine.workers))


class FirstComeScheduler:
    """A scheduler that gives each free worker the next test in the order of collection, and none in advance."""

    def __init__(self, count: int) -> None:
        self._left = iter(range(count))
        self._running: dict[Any, int] = {}
        self._nodes: list[Any] = []

    tests_finished = False

    def add_node(self, node: Any) -> None:
        self._nodes.append(node)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        pass

    def schedule(self) -> None:
        for node in self._nodes:
            self.mark_test_complete(node, -1)

    def mark_test_complete(self, node: Any, index: int, seconds: float = 0) -> None:
        following = next(self._left, None)
        if following is not None:
            node.following = following
            node.shutting_down = True  # Otherwise it would wait for the test after this one.
            node.machine.wake(node)


class PollingMachine(UniformMachine):
    """A machine that assigns devices as pytest-isolate 0.0.17 does (its ``resource_management.py``).

    Every 0.1 s, a waiting test takes its devices if enough are free. There is no queue, and no devices are reserved for
    a test that needs several. A device counts as a whole one if no part of it is taken. The timeout of 300 s, after
    which a waiting test fails, is left out.
    """

    interval = 0.1

    def run(self, worker: Worker, index: int) -> None:
        request = next(iter(self.jobs[index].requests), None)
        grant = None if request is None else next(iter(decide([request], self._free, 0)), None)
        if request is not None and grant is None:
            self.call_later(self.interval, lambda: self.run(worker, index))
            return
        devices = () if grant is None else grant.devices
        parts = WHOLE if request is None or not request.parts else request.parts[0]
        for device in devices:
            self._free[device] -= parts
        self._begin(worker, index, tuple((device, parts) for device in devices), 0)


def xdist_scheduler(name: str, machine: UniformMachine) -> Any:
    """Return the scheduler of xdist whose class is called `name`."""
    from xdist import scheduler

    spec = f"{len(machine.workers)}*popen"
    config = SimpleNamespace(getvalue=lambda _: [spec], getoption=lambda _: None, hook=None)
    result = getattr(scheduler, name)(config)
    result.log.enabled = False
    return result


SCHEDULERS: dict[str, Callable[[UniformMachine, random.Random], Any]] = {
    "ours, with history": lambda machine, draw: accel_scheduler(
        machine, [test.seconds * draw.lognormvariate(0, 0.1) for test in machine.tests]
    ),
    "ours, without": lambda machine, draw: accel_scheduler(machine, [None] * len(machine.tests)),
    "xdist's load": lambda machine, draw: xdist_scheduler("LoadScheduling", machine),
    "xdist's worksteal": lambda machine, draw: xdist_scheduler("WorkStealingScheduling", machine),
    "pytest-isolate, xdist's load": lambda machine, draw: xdist_scheduler("LoadScheduling", machine),
    "first come": lambda machine, draw: FirstComeScheduler(len(machine.tests)),
}


def lower_bound(tests: Iterable[tuple[float, float]], devices: int, workers: float) -> float:
    """Return a lower bound of the seconds for `tests`, each a number of devices (parts as fractions) and seconds.

    The bound is the maximum of: the longest test; the sum of all times, divided by the number of workers; and, for
    several measures of a test's size, the sum of size times seconds. Under each measure, the sizes of tests that run at
    the same time add up to at most 1. The measures are the dual feasible functions of Fekete and Schepers ("New classes
    of fast lower bounds for bin packing problems", 2001): under u_k, a test that fits only k times at the same time has
    the size 1/k.
    """
    longest = 0.0
    totals: dict[float, float] = {}
    for count, seconds in tests:
        longest = max(longest, seconds)
        totals[count] = totals.get(count, 0.0) + seconds
    bounds = [longest, sum(totals.values()) / workers]
    for measure in measures(devices):
        bounds.append(sum(measure(count / devices) * seconds for count, seconds in totals.items()))
    return max(bounds)


def measures(devices: int) -> Iterator[Callable[[float], float]]:
    """Yield the measures of a test's size, each a function of the fraction of the `devices` that the test takes."""
    for pieces in range(devices + 1):
        yield partial(_measure, pieces=pieces)


def _measure(size: float, pieces: int) -> float:
    """Return u_k(size) of Fekete and Schepers for k = `pieces`; the size itself if `pieces` is 0."""
    scaled = size * (pieces + 1)
    if pieces == 0 or abs(scaled - round(scaled)) < 1e-9:
        return size
    return int(scaled) / pieces


def ratios(mix: str, scheduler: str, seeds: int, workers: int = WORKERS) -> list[float]:
    """Return the makespan divided by its lower bound, for each seed."""
    found = []
    for seed in range(seeds):
        tests = MIXES[mix](random.Random(seed))
        bound = lower_bound([(test.size, test.seconds) for test in tests], DEVICES, workers)
        kind = PollingMachine if scheduler.startswith("pytest-isolate") else UniformMachine
        machine = kind(tests, DEVICES, workers)
        found.append(machine.simulate(SCHEDULERS[scheduler](machine, random.Random(seed))) / bound)
    return found


def scheduling_times(count: int) -> list[float]:
    """Return the CPU seconds of the plugin's scheduler for each of `count` tests on 64 devices and 64 workers."""
    draw = random.Random(count)
    tests = []
    for number in range(count):
        devices = draw.choice((0, 0, 1, 1, 1, 2, 4, 8, 16, 32, 64))
        share = draw.choice((1.0, 1.0, 1.0, 0.5)) if devices < 4 else 1.0
        tests.append(Test(draw.uniform(0.2, 8), devices, share, number // 20))
    machine = UniformMachine(tests, 64, 64)
    machine.simulate(accel_scheduler(machine, [test.seconds for test in tests]))
    return machine.scheduler_seconds


_SUITE = """
import os
import time

import pytest

TESTS = {tests}


def _marked(number):
    seconds, devices, share = TESTS[number]
    return pytest.param(number, seconds, marks={mark} if devices else ())


@pytest.mark.parametrize(("number", "seconds"), map(_marked, range(len(TESTS))), ids=range(len(TESTS)))
def test_holds(number, seconds):
    begun = time.time()
    time.sleep(seconds)
    with open("stamps", "a") as file:
        file.write(f"{{number}} {{begun}} {{time.time()}} {{os.environ.get('{mask}') if TESTS[number][1] else ''}}\\n")
"""


@dataclass(frozen=True, slots=True)
class RealSession:
    """The times of a session with real processes."""

    seconds: float
    """Seconds from the start of the first test with a device to the end of the last test."""
    virtual: float
    """The same time in the simulation, with the scheduler of pytest-accel."""
    before: float
    """Seconds from the start of the first test to the start of the first test with a device."""
    between: float
    """Median of the seconds from the end of a test on a device to the start of the next one on it."""


def run_real_session(folder: Path, mix: str, workers: int, isolate: str | None = None) -> RealSession:
    """Run tests of `mix` in a session with known durations, or under pytest-isolate with the interpreter `isolate`."""
    tests = [replace(test, module=0) for test in random.Random(mix).sample(MIXES[mix](random.Random(mix)), _REAL_TESTS)]
    folder.mkdir(parents=True)
    mark, mask = "pytest.mark.devices(devices, share=share if share < 1 else None)", "SIM_VISIBLE_DEVICES"
    plugins = ["-p", "accel"]
    if isolate is not None:
        mark, mask = "pytest.mark.isolate(resources={'gpu': devices * share})", "CUDA_VISIBLE_DEVICES"
        plugins = ["-p", "no:accel", "-p", "pytest_isolate"]
    facts = [(test.seconds, test.devices, test.share) for test in tests]
    (folder / "test_holds.py").write_text(_SUITE.format(tests=facts, mark=mark, mask=mask))
    (folder / "pytest.ini").write_text("[pytest]\n" if isolate else "[pytest]\naccel = sim:8\n")
    times = {f"test_holds.py::test_holds[{number}]": [(1.0, test.seconds)] for number, test in enumerate(tests)}
    durations = folder / ".pytest_cache" / "v" / "accel" / "durations"
    durations.parent.mkdir(parents=True)
    durations.write_text(json.dumps(times))
    command = [isolate or sys.executable, "-m", "pytest", "-q", "-p", "xdist", *plugins, f"-n{workers}"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if isolate is None:
        environment["PYTHONPATH"] = str(ROOT)
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(DEVICES)))
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    machine = UniformMachine(tests, DEVICES, workers)
    return _read_stamps(
        (folder / "stamps").read_text(), machine.simulate(accel_scheduler(machine, [test.seconds for test in tests]))
    )


def _read_stamps(stamps: str, virtual: float) -> RealSession:
    """Return the times of a session from the lines that its tests wrote."""
    by_device: dict[str, list[tuple[float, float]]] = {}
    begins, ends = [], []
    for line in stamps.splitlines():
        _, begin, end, *devices = line.split()
        begins.append(float(begin))
        ends.append(float(end))
        for device in devices[0].split(",") if devices else ():
            by_device.setdefault(device, []).append((float(begin), float(end)))
    first = min(spans[0][0] for spans in map(sorted, by_device.values()))
    gaps = [
        after[0] - before[1]
        for spans in map(sorted, by_device.values())
        for before, after in pairwise(spans)
        if after[0] > before[1]  # Skip tests that share the device at the same time.
    ]
    return RealSession(max(ends) - first, virtual, first - min(begins), median(gaps))


def _isolate_figure(folder: Path, mix: str) -> Figure:
    name = f"{mix}: real processes, pytest-isolate and xdist's load"
    try:
        one = run_real_session(folder, mix, DEVICES, isolate_python())
    except subprocess.CalledProcessError as error:
        return Figure(name, float("nan"), "", note=f"not run: {' '.join(error.cmd[-3:])} failed")
    return Figure(name, one.seconds / one.virtual, "", note=f"of our simulated time; {one.seconds:.1f} s")


def figures(folder: Path, effort: Effort, *, isolate: bool = False) -> list[Figure]:
    """Return the ratios of real to simulated sessions, the scheduler's CPU time, and the makespan of each mix."""
    seeds = SEEDS if effort.runs > 1 else 3
    found = []
    for mix in ("everything", "half of them shared") if effort.runs > 1 else ():
        if isolate:
            found.append(_isolate_figure(folder / f"isolate-{mix.replace(' ', '-')}", mix))
        one = run_real_session(folder / mix.replace(" ", "-"), mix, DEVICES)
        note = f"{one.seconds:.1f} s, {one.virtual:.1f} s simulated; {one.before:.1f} s before the first device, "
        note += f"{one.between * 1e3:.0f} ms between two tests on a device"
        most, target = 1 + _AGREEMENT, f"{1 + _AGREEMENT:g} of simulated"
        found.append(Figure(f"{mix}: real processes", one.seconds / one.virtual, "", most, target, note=note))
    for count in (5_000, 50_000) if effort.runs > 1 else (1_000,):
        times = [seconds * 1e3 for seconds in scheduling_times(count)]
        found.append(Figure(f"{count} tests, 64 workers: scheduling, per test", sum(times) / count, "ms"))
        found.append(Figure(f"{count} tests, 64 workers: longest scheduling", max(times), "ms", 50.0, "50 ms"))
    for mix in MIXES:
        for scheduler in SCHEDULERS:
            values = ratios(mix, scheduler, seeds)
            limit = {"ours, with history": 1.03, "ours, without": 1.10}.get(scheduler)
            target = "" if limit is None else f"{limit:g} of the bound"
            found.append(Figure(f"{mix}: {scheduler}", median(values), "", limit, target, tuple(values)))
    return found
