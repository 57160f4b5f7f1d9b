"""Tests of the pool with two sessions that share devices. The ranks are simulated: they start and end when told to."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.kill import Survivor
from pytest_accel.core.record_events import Recorders
from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.leases import HeldLease, Leases
from pytest_accel.leases.locks import SessionLocks
from pytest_accel.leases.shared_folder import VARIABLE
from pytest_accel.messages.rank_exit import exited
from pytest_accel.messages.rank_messages import RETIRED
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.pool_messages import PoolError, WorldGrant
from pytest_accel.pool.starter import StarterReports
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings
from tests.deadline import eventually
from tests.pool.plain_workers import PlainWorkers

DEVICES = [f"sim-{number}" for number in range(4)]
SETTINGS = Settings(accel="sim:4,shared")
NO_PIDS = tuple(range(2**30, 2**30 + 4))
"""Process ids that no process has."""
CPU = WorldKey("cpu", None, 2, grouped=True)


def key(devices: int, *, fresh: bool = False) -> WorldKey:
    need = DeviceNeed(devices, "sim")
    return WorldKey("sim", need, devices, grouped=True, devices_per_rank=1, fresh=fresh)


KEYS = (key(1), key(1), key(2), key(2), key(4), key(1, fresh=True), CPU)


class SimulatedRanks(LocalStarter):
    """The leases of this machine, with ranks that are no processes."""

    def warm(self) -> None:
        pass

    def start(self, spec: WorldSpec, taken: HeldLease) -> None:
        asyncio.get_running_loop().call_soon(self.reports.started, spec.world, NO_PIDS[: spec.ranks])

    def kill(self, spec: WorldSpec, after: float) -> None:
        status = RETIRED if after else -9
        for rank in range(spec.ranks):
            asyncio.get_running_loop().call_soon(self.reports.exited, spec.world, rank, exited(status))

    def kill_silent(self, spec: WorldSpec, ranks: Collection[int]) -> None:
        self.kill(spec, 0.0)

    async def stop(self) -> bool:
        return True


class OneMachine:
    """The starters of a session on this machine."""

    machines = ("",)

    def __init__(self, spec: SessionSpec, reports: StarterReports) -> None:
        def wanted(lease: HeldLease) -> None:
            reports.wanted(lease)

        leases = Leases(machine_for(SETTINGS), 2, wanted, reports.lost, waits_for_busy=False)
        self.here = SimulatedRanks(spec, leases, lambda spec, end: pytest.fail("no server"), reports)
        self.run = leases.run
        self.close = leases.close

    def of(self, key: WorldKey) -> SimulatedRanks:
        return self.here

    def warm(self) -> None:
        pass

    async def stop(self) -> bool:
        return True


@dataclass(eq=False)
class SimulatedSession:
    """A session with its pool, and the drivers that use it, all in the thread of the test."""

    pool: Pool
    answers: queue.SimpleQueue[tuple[int, WorldGrant | PoolError]] = field(default_factory=queue.SimpleQueue)
    waiting: dict[int, int] = field(default_factory=dict)
    """The pool's number of each request without an answer, by the number that the test has given it."""
    worlds: dict[int, WorldGrant] = field(default_factory=dict)
    """The worlds that drivers have."""
    wanted: set[int] = field(default_factory=set)
    """The worlds that drivers were asked to give back."""
    last: int = 0

    @classmethod
    def start(cls, folder: Path) -> SimulatedSession:
        folder.mkdir()
        spec = SessionSpec((), str(folder), (), str(folder), str(folder / "tmp"), (), (), (), (), (), distributed=False)
        pool = Pool(
            machine_for(SETTINGS),
            spec,
            2,
            workers=PlainWorkers(),
            record=Recorders(),
            starters=lambda reports: OneMachine(spec, reports),
        )
        return cls(pool)

    def on_wanted(self, world: int) -> None:
        self.wanted.add(world)

    def request(self, wanted: WorldKey) -> int:
        self.last += 1
        number = self.last
        demand = WorldDemand(wanted, Holder.here(f"test {number}"))
        answer = self.answers.put
        self.waiting[number] = self.pool.call(self.pool.acquire, demand, self, lambda given: answer((number, given)))
        return number

    def cancel(self, number: int) -> None:
        self.pool.call(self.pool.cancel, self.waiting.pop(number))

    def receive(self, timeout: float = 30.0) -> WorldGrant | None:
        """Wait for an answer; return the world that a driver has got, or None if its request was cancelled before."""
        number, answer = self.answers.get(timeout=timeout)
        assert isinstance(answer, WorldGrant), answer
        if self.waiting.pop(number, None) is None:
            self.pool.call(self.pool.release, answer.spec.world, None, frozenset())
            return None
        assert answer.spec.world not in self.worlds, "a world was given to two drivers"
        self.worlds[answer.spec.world] = answer
        return answer

    def give_back(self, number: int, kill_reason: str | None = None, *, retire: bool = False) -> None:
        self.wanted.discard(number)
        del self.worlds[number]
        self.pool.call(self.pool.release, number, kill_reason, frozenset(range(9)), retire)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the locks."""
    locks = tmp_path / "locks"
    locks.mkdir()
    monkeypatch.setenv(VARIABLE, str(locks))
    return locks


def used(sessions: list[SimulatedSession]) -> list[str]:
    return [one.id for session in sessions for grant in session.worlds.values() for one in grant.spec.devices]


def receive_all(session: SimulatedSession) -> None:
    while not session.answers.empty():
        session.receive()


def step(chance: random.Random, session: SimulatedSession) -> None:
    """Do one thing that a driver, or fate, may do."""
    action = chance.choice(("request", "request", "request", "return", "return", "return", "cancel", "kill", "death"))
    if action == "request" and len(session.waiting) + len(session.worlds) < 5:
        session.request(chance.choice(KEYS))
    elif action == "cancel" and session.waiting:
        session.cancel(chance.choice(list(session.waiting)))
    elif session.worlds:
        number = chance.choice(list(session.worlds))
        if action == "return":
            session.give_back(number, retire=chance.random() < 0.2)
        elif action == "kill":
            session.give_back(number, "a rank hangs")
        elif action == "death":
            session.pool.call(session.pool.exited, number, 0, exited(1))


@pytest.mark.parametrize("steps", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_device_is_given_twice_and_nobody_starves_whatever_drivers_do(
    folder: Path, tmp_path: Path, steps: int
) -> None:
    chance = random.Random(steps)
    sessions = [SimulatedSession.start(tmp_path / name) for name in "ab"]
    for _ in range(steps):
        session = chance.choice(sessions)
        step(chance, session)
        receive_all(session)
        assert len(used(sessions)) == len(set(used(sessions)))
    # All requests are answered if the worlds are given back, in whatever order.
    while any(session.waiting for session in sessions):
        for session in sessions:
            for number in list(session.worlds):
                session.give_back(number)
        session = next(one for one in sessions if one.waiting)
        other = sessions[1 - sessions.index(session)]
        eventually("an answer", lambda: not session.answers.empty() or not other.answers.empty())  # noqa: B023
        receive_all(session)
        receive_all(other)
        assert len(used(sessions)) == len(set(used(sessions)))
    for session in sessions:
        session.pool.close(gracefully=chance.random() < 0.5)
        assert session.pool.worlds == {}
        assert session.pool.broken is None
    locks = SessionLocks(folder)
    assert [locks.lock(device) for device in DEVICES] == [True] * 4
    locks.close()
    assert [one.name for one in threading.enumerate() if one.name == "accel-pool"] == []


def test_a_returned_world_goes_to_the_next_request_with_the_same_key(folder: Path, tmp_path: Path) -> None:
    session = SimulatedSession.start(tmp_path / "a")
    session.request(key(4))
    first = session.receive()
    assert first is not None
    assert not first.warm
    session.request(key(4))
    session.request(key(2))
    eventually("the world to be wanted", lambda: session.wanted == {first.spec.world})
    session.give_back(first.spec.world)
    second = session.receive()
    assert second is not None
    assert (second.spec.world, second.warm) == (first.spec.world, True)
    session.give_back(first.spec.world)  # The next request has another key, so the world ends.
    third = session.receive()
    assert third is not None
    assert len(third.spec.devices) == 2
    session.pool.close(gracefully=False)


def test_an_idle_world_of_another_session_is_given_up_at_once(folder: Path, tmp_path: Path) -> None:
    one, other = (SimulatedSession.start(tmp_path / name) for name in "ab")
    one.request(key(2))
    grant = one.receive()
    assert grant is not None
    one.give_back(grant.spec.world)
    other.request(key(4))
    assert other.receive() is not None
    assert one.pool.call(lambda: dict(one.pool.worlds)) == {}
    for session in (one, other):
        session.pool.close(gracefully=True)


def test_a_killed_process_that_takes_a_while_to_end_is_no_error(folder: Path, tmp_path: Path) -> None:
    session = SimulatedSession.start(tmp_path / "a")
    session.request(key(1))
    grant = session.receive()
    assert grant is not None
    left = Survivor(2**30, 0.0, "process 1073741824 (it; user ci, running)")
    session.pool.call(session.pool.left, grant.spec.world, (left,))
    session.give_back(grant.spec.world, "a rank hangs")
    eventually("the world to end", lambda: not session.pool.call(lambda: dict(session.pool.worlds)))
    session.pool.call(session.pool.left, grant.spec.world, ())
    session.pool.close(gracefully=False)
    assert session.pool.summary.errors == []


def test_a_request_without_a_wait_fails_although_it_has_just_been_made(folder: Path, tmp_path: Path) -> None:
    session = SimulatedSession.start(tmp_path / "a")
    session.request(key(4))
    assert session.receive() is not None

    def request_and_fail() -> None:
        number = session.request(key(1))
        session.pool.fail_if_waiting(session.waiting[number], "no devices came free")

    session.pool.call(request_and_fail)
    _, answer = session.answers.get(timeout=30)
    assert str(answer).startswith("no devices came free\nsim-0")
    session.pool.close(gracefully=False)


def test_a_request_that_waits_too_long_fails_with_the_holders(folder: Path, tmp_path: Path) -> None:
    session = SimulatedSession.start(tmp_path / "a")
    session.request(key(4))
    assert session.receive() is not None
    number = session.request(key(1))
    eventually("the request to wait", lambda: session.pool.call(session.pool.waiting, session.waiting[number]))
    session.pool.call(session.pool.fail_if_waiting, session.waiting[number], "no devices came free")
    _, answer = session.answers.get(timeout=30)
    assert str(answer).startswith("no devices came free\nsim-0, sim-1, sim-2, sim-3 are held by pid ")
    assert " for test 1 since " in str(answer)
    session.pool.close(gracefully=False)
