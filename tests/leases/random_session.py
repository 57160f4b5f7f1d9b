"""Program of `test_leases.py`: a separate session that takes leases at random and records them.

``python -m tests.leases.random_session LOG STEPS SEED`` prints ``ready`` and waits for a line. It exits with 0 if every
request was granted or cancelled, and nothing is left.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Iterable

import psutil

from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.leases import HeldLease
from pytest_accel.leases.shared_folder import default_folder
from tests.leases.demands import devices, session, slots

TESTS = 6
"""Tests that run at the same time in a session."""
SHARES = (None, None, 0.3, 0.5)
LONGEST = 0.002
"""Maximum seconds of a test, and of a request that is cancelled."""


class RandomSession:
    """The tests of one session: they take, pass on, keep and return leases, and cancel some requests."""

    def __init__(self, log: str, seed: int) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND)
        self._draw = random.Random(seed)
        self._worlds: set[HeldLease] = set()
        """The leases that were granted and not returned."""
        self._idle: list[HeldLease] = []
        self._left: set[asyncio.Task[None]] = set()
        self._handed_over: dict[int, HeldLease] = {}
        """The leases that tests have handed over, by the id of the demand that gets them."""
        self._leases = session("sim:4,shared", slots=3, on_wanted=self._wanted)

    def _note(self, word: str, lease: HeldLease) -> None:
        for device, parts in lease.granted.takes():
            os.write(self._log, f"{word} {device} {parts} {os.getpid()}.{lease.granted.id}\n".encode())

    def _wanted(self, lease: HeldLease) -> None:
        if lease in self._idle:
            self._idle.remove(lease)
            self._end(lease)

    def _end(self, lease: HeldLease) -> None:
        """Return a lease. Some processes on whole devices are left for a while, and keep these."""
        self._worlds.remove(lease)
        if not lease.granted.parts and self._draw.random() < 0.2:
            task = asyncio.create_task(self._leave(lease, [os.dup(one) for one in lease.descriptors]))
            self._left.add(task)
            task.add_done_callback(self._left.discard)
        else:
            self._note("back", lease)
        self._leases.give_back(lease, killed=self._draw.random() < 0.5)

    async def _leave(self, lease: HeldLease, descriptors: Iterable[int]) -> None:
        await asyncio.sleep(self._draw.random() * LONGEST)
        self._note("back", lease)
        for descriptor in descriptors:
            os.close(descriptor)

    def _demand(self) -> WorldDemand:
        if self._draw.random() < 0.15:
            return slots(self._draw.randint(1, 3))
        share = self._draw.choice(SHARES)
        if share is None:
            return devices(self._draw.randint(1, 4))
        return devices(2, share=share, sets=2) if self._draw.random() < 0.3 else devices(1, share=share)

    async def _take(self, demand: WorldDemand) -> HeldLease | None:
        """Return a lease, or None if the request was cancelled."""
        idle = next((one for one in self._idle if one.demand.key == demand.key), None)
        if idle is not None:
            self._idle.remove(idle)
            return idle
        request = asyncio.create_task(self._leases.take(demand))
        if self._draw.random() < 0.2:
            await asyncio.sleep(self._draw.random() * LONGEST)
            request.cancel()
        try:
            lease = await request
        except asyncio.CancelledError:
            assert self._leases.waiting(demand) is None
            return self._handed_over.pop(id(demand), None)
        self._worlds.add(lease)
        self._note("got", lease)
        return lease

    def _hand_over(self, lease: HeldLease) -> bool:
        """Give a lease to the next test if that is possible."""
        demand = self._leases.hand_on(lease)
        if demand is None:
            return False
        self._handed_over[id(demand)] = lease
        return True

    async def _run_test(self) -> None:
        lease = await self._take(self._demand())
        if lease is None:
            return
        await asyncio.sleep(self._draw.random() * LONGEST)
        if lease.devices and self._hand_over(lease):
            return
        if lease.wanted or lease.slots or self._draw.random() < 0.5:
            self._end(lease)
        else:
            self._idle.append(lease)

    async def run(self, steps: int) -> None:
        """Run `steps` tests, and return all leases."""
        background = asyncio.create_task(self._leases.run())

        async def run_tests() -> None:
            nonlocal steps
            while steps > 0:
                steps -= 1
                await self._run_test()

        await asyncio.gather(*(run_tests() for _ in range(TESTS)))
        while self._idle:
            self._end(self._idle.pop())
        await asyncio.gather(*self._left)
        assert not self._worlds
        background.cancel()
        opened = [file.path for file in psutil.Process().open_files() if file.path.startswith(str(default_folder()))]
        assert not opened, opened
        self._leases.close()


def main(log: str, steps: str, seed: str) -> None:
    """Run a session as the command line says."""
    one = RandomSession(log, int(seed))
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(one.run(int(steps)))


if __name__ == "__main__":
    main(*sys.argv[1:])
