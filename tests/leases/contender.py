"""Program of `test_contention.py`: a separate session that takes leases repeatedly and records them."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from queue import Queue

from pytest_accel.leases.broker import Broker
from pytest_accel.leases.device_locks import DeviceLocks
from pytest_accel.leases.policy import Lease
from tests.leases.requests import submit


def contend(folder: Path, log: Path, devices: tuple[str, ...], rounds: int, seed: int) -> None:
    """Take `rounds` leases of one or more devices, up to two at a time, and write each grant and return to `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    generator = random.Random(seed)
    granted: Queue[Lease] = Queue()

    def note(word: str, lease: Lease) -> None:
        for device in lease.devices:
            os.write(descriptor, f"{word} {device} {os.getpid()}.{lease.id}\n".encode())

    def on_grant(lease: Lease) -> None:
        note("got", lease)
        granted.put(lease)

    broker = Broker(devices, 0, DeviceLocks(folder), lambda _: None)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(rounds + 1):
        if number < rounds:
            count = generator.randint(1, len(devices))
            submit(broker, generator.sample(devices, k=len(devices)), count, on_grant)
        if number:
            lease = granted.get()
            note("back", lease)
            broker.release(lease.id)
    broker.close()


if __name__ == "__main__":
    folder, log, devices, rounds, seed = sys.argv[1:]
    contend(Path(folder), Path(log), tuple(devices.split(",")), int(rounds), int(seed))
