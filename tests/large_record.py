"""Writes the record of a large simulated session, with tests of all verdicts on the devices of several machines."""

from __future__ import annotations

import heapq
import random
from collections.abc import Generator, Iterator
from operator import itemgetter
from pathlib import Path

from msgspec.structs import replace

from pytest_accel.core.record_events import (
    SCHEMA,
    DeviceFound,
    Event,
    MachineFound,
    PhaseReported,
    PoolOpened,
    RankPhase,
    RankPlace,
    RequestWaits,
    SessionFinished,
    SessionStarted,
    TestStarted,
    WorldAcquired,
    WorldReady,
    WorldRequested,
    WorldReturned,
    WorldStarting,
)
from pytest_accel.features.record.record_file import RecordFile

START = 1_790_000_000.0
_ON_A_NODE = 8
"""Devices of one machine."""
_SIZES = (1, 1, 1, 1, 2, 2, 4, 8)
"""The devices of a test; each is as likely as the others."""


def write_record(path: Path, tests: int, devices: int) -> None:
    """Write the record of a session of `tests` tests on `devices` devices (8 on each machine), always the same."""
    now = [START]
    file = RecordFile(str(path), clock=lambda: now[0])
    for now[0], event in _events(tests, devices):
        file(event)
    file.close()


def _events(tests: int, devices: int) -> list[tuple[float, Event]]:
    """Return the events with their times, in order."""
    events: list[tuple[float, Event]] = [(START, SessionStarted(SCHEMA, "1a46e", "0.1.0", ("-n", "64"), "/suite"))]
    events.append((START + 1, PoolOpened(slots=16, kind="cuda")))
    nodes = -(-devices // _ON_A_NODE)
    events += [(START + 1, MachineFound(node, f"gpu-{node:02}.cluster")) for node in range(nodes) if nodes > 1]
    ids = {number: f"GPU-{random.Random(number).getrandbits(128):032x}" for number in range(devices)}
    for number, device in ids.items():
        node, index = divmod(number, _ON_A_NODE)
        events.append((START + 1, DeviceFound(device, "cuda", index, "NVIDIA H100 80GB HBM3", node, 80 << 30)))
    session = _LargeSession(ids)
    for number in range(tests):
        events += session.run(number)
    events.sort(key=itemgetter(0))
    return [*events, (events[-1][0] + 1, SessionFinished(1))]


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

    def run(self, number: int) -> Iterator[tuple[float, Event]]:
        """Yield the events of test `number`."""
        draw = self._random.random()
        requested, worker = heapq.heappop(self._workers)
        test = f"tests/module_{number % 97}/test_kernels_{number % 97}.py::test_matmul[bfloat16-{number}]"
        yield requested, TestStarted(test)
        if draw < 0.04:
            stop = requested + 0.01
            missing = "needs 16 cuda devices on one node; there are 8" if draw < 0.03 else None
            skip = missing or "flash-attn is not installed"
            phase = PhaseReported(test, "setup", "skipped", requested, stop, f"gw{worker}", skip=skip, missing=missing)
            yield stop, phase
            yield stop, PhaseReported(test, "teardown", "passed", stop, stop, f"gw{worker}")
        else:
            stop = yield from self._run_on_devices(number, test, requested, worker, draw)
        heapq.heappush(self._workers, (stop + 0.01, worker))

    def _run_on_devices(
        self, number: int, test: str, requested: float, worker: int, draw: float
    ) -> Generator[tuple[float, Event], None, float]:
        """Yield the events of a test that runs, and return the time at which it ends."""
        devices = self._choose(self._random.choice(_SIZES))
        leased = max(requested, *(self._free[device] for device in devices)) + 0.001
        yield requested, WorldRequested(number, test, f"{len(devices)} on cuda")
        if leased > requested + 0.1:
            yield requested, RequestWaits(number, f"{test} waits for {len(devices)} cuda devices: held by other tests")
        world, start = self._worlds.get(devices), leased
        reused = world is not None and self._random.random() < 0.7
        if not reused:
            world, start = number + 1, leased + 0.3
            node = devices[0] // _ON_A_NODE
            places = tuple(RankPlace(node, (self._ids[device],)) for device in devices)
            yield leased, WorldStarting(world, number, f"{len(devices)} on cuda", places)
            yield start - 0.01, WorldReady(world, tuple(range(40_000, 40_000 + len(devices))))
        assert world is not None
        self._worlds[devices] = world
        yield start, WorldAcquired(world, number, reused)
        stop = start + min(self._random.lognormvariate(1.2, 0.8), 60)
        outcome = "failed" if draw < 0.08 else "passed"
        for when, begin, end in (("setup", start, start + 0.05), ("call", start + 0.05, stop)):
            ended = outcome if when == "call" else "passed"
            ranks = tuple(RankPhase(rank, ended, begin, end) for rank in range(len(devices)))
            phase = PhaseReported(test, when, ended, begin, end, f"gw{worker}", 1000 + worker, world=world, ranks=ranks)
            yield end, phase if ended == "passed" else _failure(phase, number)
        peaks = {str(rank): (1 << 30) + number * 1000 for rank in range(len(devices))}
        last = PhaseReported(test, "teardown", "passed", stop, stop + 0.02, f"gw{worker}", 1000 + worker, peaks=peaks)
        yield stop + 0.02, last
        yield stop + 0.02, WorldReturned(world)
        for device in devices:
            self._free[device] = stop + 0.02
        return stop + 0.02

    def _choose(self, size: int) -> tuple[int, ...]:
        """Return the `size` devices of one machine that are free first."""
        blocks = range(0, len(self._ids) - size + 1, size)
        first = min(blocks, key=lambda block: max(self._free[device] for device in range(block, block + size)))
        return tuple(range(first, first + size))


def _failure(phase: PhaseReported, number: int) -> PhaseReported:
    lines = [f"E   AssertionError: tensor {line} differs by {number / (line + 1):.6f}" for line in range(number % 200)]
    return replace(
        phase,
        file="tests/test_kernels.py",
        line=10,
        headline=f"AssertionError: tensors of test {number} differ",
        failure="\n".join([f"failure of test {number}", *lines]),
        place=("tests/test_kernels.py", 14),
        failed_ranks=(0,),
        output={"Captured stdout call [rank 0]": f"output of test {number}\n" * (number % 40)},
    )
