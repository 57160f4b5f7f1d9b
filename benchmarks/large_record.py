"""Writes the record of a large simulated session, with tests of all verdicts on the devices of several machines."""

from __future__ import annotations

import heapq
import random
from collections.abc import Generator, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from pytest_accel.features.record.record_file import SCHEMA, RecordFile

START = 1_790_000_000.0
_ON_A_NODE = 8
"""Devices of one machine."""
_SIZES = (1, 1, 1, 1, 2, 2, 4, 8)
"""The devices of a test; each is as likely as the others."""
_Event = tuple[float, str, dict[str, Any]]
"""Time, name and fields of an event."""


def write_record(path: Path, tests: int, devices: int) -> None:
    """Write the record of a session of `tests` tests on `devices` devices (8 on each machine), always the same."""
    file = RecordFile(str(path))
    for at, event, fields in _events(tests, devices):
        file(event, at=at, **fields)
    file.close()


def _events(tests: int, devices: int) -> list[_Event]:
    """Return the events in order."""
    about = {"schema": SCHEMA, "session": "1a46e", "version": "0.1.0", "command": ["-n", "64"], "root": "/suite"}
    events: list[_Event] = [(START, "SessionStarted", about)]
    ids = {number: f"GPU-{random.Random(number).getrandbits(128):032x}" for number in range(devices)}
    for number, device in ids.items():
        found = {"device": device, "kind": "cuda", "index": number % _ON_A_NODE, "name": "NVIDIA H100 80GB HBM3"}
        events.append((START + 1, "DeviceFound", found | {"machine": _machine(number), "memory": 80 << 30}))
    session = _LargeSession(ids)
    for number in range(tests):
        events += session.run(number)
    events.sort(key=itemgetter(0))
    return [*events, (events[-1][0] + 1, "SessionFinished", {"status": 1})]


def _machine(number: int) -> str:
    """Return the name of the machine of a device."""
    return f"gpu-{number // _ON_A_NODE:02}.cluster"


class _LargeSession:
    """A simulated session: runs each test on the devices that are free first, without a process."""

    def __init__(self, ids: dict[int, str]) -> None:
        self._random = random.Random(7)
        self._ids = ids
        self._free = dict.fromkeys(ids, START + 2)
        """Time at which each device is free."""
        self._workers = [(START + 2 + 0.01 * number, number) for number in range(len(ids))]
        self._worlds: dict[tuple[int, ...], int] = {}
        """The number of the last world on some devices."""

    def run(self, number: int) -> Iterator[_Event]:
        """Yield the events of test `number`."""
        draw = self._random.random()
        requested, worker = heapq.heappop(self._workers)
        test = f"tests/module_{number % 97}/test_kernels_{number % 97}.py::test_matmul[bfloat16-{number}]"
        about = {"test": test, "worker": f"gw{worker}"}
        yield requested, "TestStarted", about
        if draw < 0.04:
            stop = requested + 0.01
            why = "needs 16 cuda devices on one node; there are 8" if draw < 0.03 else "flash-attn is not installed"
            missing = {"missing": why} if draw < 0.03 else {}
            setup = {"when": "setup", "outcome": "skipped", "start": requested, "stop": stop, "skip": why, **missing}
            yield stop, "PhaseReported", about | setup
            teardown = {"when": "teardown", "outcome": "passed", "start": stop, "stop": stop}
            yield stop, "PhaseReported", about | teardown
        else:
            stop = yield from self._run_on_devices(number, about, requested, draw)
        heapq.heappush(self._workers, (stop + 0.01, worker))

    def _run_on_devices(
        self, number: int, about: dict[str, Any], requested: float, draw: float
    ) -> Generator[_Event, None, float]:
        """Yield the events of a test that runs, and return the time at which it ends."""
        devices = self._choose(self._random.choice(_SIZES))
        leased = max(requested, *(self._free[device] for device in devices)) + 0.001
        words = f"{len(devices)} on cuda"
        yield requested, "WorldRequested", {"request": number, "test": about["test"], "about": words}
        if leased > requested + 0.1:
            why = f"{about['test']} waits for {len(devices)} cuda devices: held by other tests"
            yield requested, "RequestWaits", {"request": number, "why": why}
        world, start = self._worlds.get(devices), leased
        reused = world is not None and self._random.random() < 0.7
        if not reused:
            world, start = number + 1, leased + 0.3
            places = [{"machine": _machine(device), "devices": [self._ids[device]]} for device in devices]
            yield leased, "WorldStarting", {"world": world, "request": number, "about": words, "places": places}
            yield start - 0.01, "WorldReady", {"world": world, "pids": list(range(40_000, 40_000 + len(devices)))}
        assert world is not None
        self._worlds[devices] = world
        yield start, "WorldAcquired", {"world": world, "request": number, "reused": reused}
        stop = start + min(self._random.lognormvariate(1.2, 0.8), 60)
        outcome = "failed" if draw < 0.08 else "passed"
        for when, begin, end in (("setup", start, start + 0.05), ("call", start + 0.05, stop)):
            ended = outcome if when == "call" else "passed"
            ranks = [{"rank": rank, "ending": ended, "start": begin, "stop": end} for rank in range(len(devices))]
            phase = {"when": when, "outcome": ended, "start": begin, "stop": end, "world": world, "ranks": ranks}
            yield end, "PhaseReported", about | phase | ({} if ended == "passed" else _failure(number))
        peaks = {str(rank): (1 << 30) + number * 1000 for rank in range(len(devices))}
        last = {"when": "teardown", "outcome": "passed", "start": stop, "stop": stop + 0.02, "peaks": peaks}
        yield stop + 0.02, "PhaseReported", about | last
        yield stop + 0.02, "WorldReturned", {"world": world}
        for device in devices:
            self._free[device] = stop + 0.02
        return stop + 0.02

    def _choose(self, size: int) -> tuple[int, ...]:
        """Return the `size` devices of one machine that are free first."""
        blocks = range(0, len(self._ids) - size + 1, size)
        first = min(blocks, key=lambda block: max(self._free[device] for device in range(block, block + size)))
        return tuple(range(first, first + size))


def _failure(number: int) -> dict[str, Any]:
    lines = [f"E   AssertionError: tensor {line} differs by {number / (line + 1):.6f}" for line in range(number % 200)]
    return {
        "file": "tests/test_kernels.py",
        "line": 10,
        "headline": f"AssertionError: tensors of test {number} differ",
        "failure": "\n".join([f"failure of test {number}", *lines]),
        "place": ("tests/test_kernels.py", 14),
        "failed_ranks": [0],
        "output": {"Captured stdout call [rank 0]": f"output of test {number}\n" * (number % 40)},
    }
