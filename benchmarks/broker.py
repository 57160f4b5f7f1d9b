"""Time of a lease, and exclusiveness of leases when two sessions request the same devices.

``python benchmarks/broker.py`` prints a table and exits with status 1 if a device was granted twice at a time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.world_key import WorldKey
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.demand import Holder, WorldDemand
from pytest_accel.leases.leases import Leases
from pytest_accel.leases.shared_folder import VARIABLE

UNCONTENDED = 10_000
"""Leases without contention."""
SESSIONS = 2
CLIENTS = 8
"""Clients of each session."""
LEASES = 100
"""Leases of each client."""
DEVICES = 8
HOLD = 0.004
"""Seconds for which a client keeps a lease."""


def demand(count: int) -> WorldDemand:
    """Return a demand for `count` devices."""
    key = WorldKey("sim", DeviceNeed(count, "sim"), 1, grouped=False, devices_per_rank=count)
    return WorldDemand(key, Holder.here("benchmarks/broker.py"))


def session_leases(accel: str) -> Leases:
    """Return the leases of a session; its lock folder is that of the environment."""
    return Leases(Machine(accel), 0, lambda: None, waits_for_busy=False)


async def uncontended(accel: str) -> float:
    """Return the median time to take and return a lease without contention, in milliseconds."""
    leases, one = session_leases(accel), demand(1)
    times: list[float] = []
    for _ in range(UNCONTENDED):
        start = time.perf_counter()
        leases.give_back(await leases.take(one))
        times.append(time.perf_counter() - start)
    leases.close()
    return median(times) * 1e3


def client(connection: Connection, log: Path, seed: int, sizes: Sequence[int]) -> None:
    """Take leases of one of the `sizes`, keep each for a moment, and log when each device was granted and released."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    generator = random.Random(seed)

    def note(word: str, devices: tuple[str, ...]) -> None:
        for device in devices:
            os.write(descriptor, f"{word} {device} {seed} {time.monotonic_ns()}\n".encode())

    connection.recv()
    for _ in range(LEASES):
        connection.send(generator.choice(sizes))
        devices = connection.recv()
        note("got", devices)
        time.sleep(HOLD)
        note("back", devices)
        connection.send(None)
    connection.close()


def session(start: Connection, folder: Path, log: Path, number: int, sizes: Sequence[int]) -> None:
    """Run one session and its clients. Each client is a process at the other end of a pipe."""
    context = multiprocessing.get_context("fork")
    clients: list[multiprocessing.process.BaseProcess] = []
    connections: list[Connection] = []
    for place in range(CLIENTS):
        mine, theirs = context.Pipe()
        clients.append(context.Process(target=client, args=(theirs, log, number * CLIENTS + place, sizes)))
        clients[-1].start()
        theirs.close()
        connections.append(mine)
    os.environ[VARIABLE] = str(folder)
    asyncio.run(_serve_all(start, connections))
    for process in clients:
        process.join()


async def _serve_all(start: Connection, connections: Sequence[Connection]) -> None:
    leases = session_leases(f"sim:{DEVICES},shared")
    background = asyncio.create_task(leases.run())
    start.send(None)
    start.recv()
    for connection in connections:
        connection.send(None)
    await asyncio.gather(*(_serve(leases, connection) for connection in connections))
    background.cancel()
    leases.close()


async def _serve(leases: Leases, connection: Connection) -> None:
    """Take a lease for each number that a client sends, until the client has ended."""
    try:
        while True:
            lease = await leases.take(demand(await _receive(connection)))
            connection.send(tuple(device.id for device in lease.devices))
            await _receive(connection)
            leases.give_back(lease)
    except EOFError:
        pass


async def _receive(connection: Connection) -> Any:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(connection.fileno(), ready.set_result, None)
    try:
        await ready
    finally:
        loop.remove_reader(connection.fileno())
    return connection.recv()


def read_log(log: Path) -> Iterator[tuple[str, str, str, int]]:
    """Yield word, device, number of the client, and time of each line."""
    for line in log.read_text().splitlines():
        word, device, who, moment = line.split()
        yield word, device, who, int(moment)


def contended(folder: Path, sizes: Sequence[int]) -> dict[str, float]:
    """Return the times from the release of a device to its next grant, and how often a device was granted twice."""
    log = folder / f"log-{len(sizes)}"
    log.touch()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(SESSIONS)]
    sessions = [
        context.Process(target=session, args=(theirs, folder / "locks", log, number, sizes))
        for number, (_, theirs) in enumerate(pipes)
    ]
    for process in sessions:
        process.start()
    for mine, _ in pipes:
        mine.recv()
    begin = time.monotonic()
    for mine, _ in pipes:
        mine.send(None)
    for process in sessions:
        process.join()
    seconds = time.monotonic() - begin

    owner: dict[str, str] = {}
    released: dict[str, tuple[int, str]] = {}
    within: list[float] = []
    between: list[float] = []
    leases = double_grants = 0
    for word, device, who, moment in read_log(log):
        if word == "got":
            leases += 1
            double_grants += device in owner
            owner[device] = who
            if device in released:
                since, last = released[device]
                same = int(last) // CLIENTS == int(who) // CLIENTS
                (within if same else between).append((moment - since) / 1e6)
        else:
            double_grants += owner.pop(device, None) != who
            released[device] = (moment, who)
    if any(process.exitcode for process in sessions) or owner:
        raise RuntimeError(f"a session failed: {[process.exitcode for process in sessions]}, still held: {owner}")
    handovers = within + between
    return {
        "device grants": leases,
        "granted twice": double_grants,
        "hand-over median, ms": median(handovers),
        "hand-over 95th percentile, ms": quantiles(handovers, n=20)[-1],
        "within a session, median, ms": median(within) if within else float("nan"),
        "between sessions, median, ms": median(between) if between else float("nan"),
        "hand-overs between sessions": len(between),
        "seconds": seconds,
    }


def measure() -> dict[str, float]:
    """Return the figures by name."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[VARIABLE] = str(folder / "locks")
        found["lease without locks, median, ms"] = asyncio.run(uncontended(f"sim:{DEVICES}"))
        found["lease with locks, median, ms"] = asyncio.run(uncontended(f"sim:{DEVICES},shared"))
        for mix, sizes in {"single": (1,), "mixed": (1, 1, 2, 4)}.items():
            found.update({f"{mix}: {key}": value for key, value in contended(folder, sizes).items()})
    return found


TARGETS = {
    "lease without locks, median, ms": 0.3,
    "lease with locks, median, ms": 0.3,
    "single: hand-over median, ms": 5.0,
    "single: granted twice": 0.0,
    "mixed: granted twice": 0.0,
}


def main() -> int:
    """Measure and print; return 1 if a device was granted twice."""
    found = measure()
    print(f"{SESSIONS} sessions of {CLIENTS} clients, {DEVICES} devices, {os.cpu_count()} cores")
    print("single: every lease is for one device; mixed: for one, two or four\n")
    for key, value in found.items():
        target = f"  (at most {TARGETS[key]:g})" if key in TARGETS else ""
        print(f"{key:<45} {value:>10.3f}{target}")
    return int(any(value for key, value in found.items() if key.endswith("granted twice")))


if __name__ == "__main__":
    sys.exit(main())
