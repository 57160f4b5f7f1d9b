"""Tests of the pool with two sessions that share devices. The ranks are simulated: they start and end when told to."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_accel.core.device import DeviceNeed, Share
from pytest_accel.core.record_events import Recorder, pass_to
from pytest_accel.core.world_key import WorldKey
from pytest_accel.forkserver.server_messages import RankExited, WorldStarted
from pytest_accel.leases.demand import Holder, WorldDemand
from pytest_accel.leases.leases import HeldLease, Leases
from pytest_accel.leases.locks import SessionLocks
from pytest_accel.leases.shared_folder import VARIABLE
from pytest_accel.messages.rank_messages import RETIRED, exited
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool import worlds
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.pool_client import (
    Answer,
    CancelDemand,
    PoolMessage,
    WorldGrant,
    WorldWanted,
)
from pytest_accel.pool.starter import LocalStarter, StarterReports
from pytest_accel.settings.options import Settings, machine_for
from tests.deadline import eventually, scaled

DEVICES = [f"sim-{number}" for number in range(4)]
SETTINGS = Settings(accel="sim:4,shared")
NO_PIDS = tuple(range(2**30, 2**30 + 30))
"""Process ids that no process has."""
CPU = WorldKey("cpu", None, 2, grouped=True)
NO_RECORD = pass_to()


def key(devices: int, *, share: float | None = None, fresh: bool = False) -> WorldKey:
    """Return the key of a world with a rank for each of `devices`, or with ranks that may share a device."""
    need = DeviceNeed(devices, "sim", share=Share(fraction=share) if share else None, sets=devices if share else 1)
    return WorldKey("sim", need, devices, grouped=True, devices_per_rank=1, fresh=fresh)


KEYS = (key(1), key(1), key(2), key(2), key(4), key(1, fresh=True), key(1, share=0.3), key(2, share=0.4), CPU)


class SimulatedRanks(LocalStarter):
    """The leases of this machine, with ranks that are no processes."""

    def warm(self) -> None:
        pass

    def start(self, spec: WorldSpec, taken: HeldLease) -> None:
        started = WorldStarted(spec.world, NO_PIDS[: spec.ranks])
        asyncio.get_running_loop().call_soon(self.reports.report, started)

    def kill(self, spec: WorldSpec) -> None:
        for rank in range(spec.ranks):
            self.end(spec, rank, -9)

    def end(self, spec: WorldSpec, rank: int, status: int) -> None:
        asyncio.get_running_loop().call_soon(self.reports.report, RankExited(spec.world, rank, exited(status)))

    def kill_servers(self, spec: WorldSpec) -> None:
        self.kill(spec)

    async def stop(self) -> bool:
        return True


STARTERS: dict[str, SimulatedRanks] = {}
"""The starter of each session, by the session's folder."""


def simulated(spec: SessionSpec, reports: StarterReports) -> SimulatedRanks:
    """Return the starter of a session on this machine."""
    leases = Leases(machine_for(SETTINGS), 2, reports.give_up_wanted, waits_for_busy=False)
    starter = SimulatedRanks(spec, leases, lambda spec: pytest.fail("no server"), reports)
    STARTERS[spec.directory] = starter
    return starter


@dataclass(eq=False)
class SimulatedSession:
    """A session with its pool, and the drivers that use it, all in the thread of the test."""

    pool: Pool
    answers: queue.SimpleQueue[tuple[int, WorldGrant | str]] = field(default_factory=queue.SimpleQueue)
    waiting: set[int] = field(default_factory=set)
    """The requests without an answer."""
    worlds: dict[int, WorldGrant] = field(default_factory=dict)
    """The worlds that drivers have."""
    wanted: set[int] = field(default_factory=set)
    """The worlds that drivers were asked to give back."""
    last: int = 0

    @classmethod
    def start(cls, folder: Path, record: Recorder = NO_RECORD) -> SimulatedSession:
        folder.mkdir()
        spec = SessionSpec((), str(folder), (), str(folder), str(folder / "tmp"), (), (), (), (), (), distributed=False)
        pool = Pool(
            machine_for(SETTINGS),
            spec,
            2,
            wait=None,
            record=record,
            show=print,
            starters=lambda reports: (simulated(spec, reports),) * 2,
        )
        return cls(pool)

    def handle(self, message: PoolMessage) -> None:
        match message:
            case Answer(request, value):
                self.answers.put((request, value))
            case WorldWanted(world):
                self.wanted.add(world)

    def request(self, wanted: WorldKey) -> None:
        self.last += 1
        demand = WorldDemand(wanted, Holder.here(f"test {self.last}"), self.last)
        self.waiting.add(self.last)
        self.pool.call(self.pool.serve, self, demand)

    def cancel(self, number: int) -> None:
        self.waiting.remove(number)
        self.pool.call(self.pool.serve, self, CancelDemand(number))

    def receive(self) -> WorldGrant | None:
        """Wait for an answer; return the world that a driver has got, or None if its request was cancelled before."""
        number, answer = self.answers.get(timeout=scaled(30))
        assert isinstance(answer, WorldGrant), answer
        if number not in self.waiting:
            return None
        self.waiting.remove(number)
        assert answer.spec.world not in self.worlds, "a world was given to two drivers"
        self.worlds[answer.spec.world] = answer
        return answer

    def take(self, wanted: WorldKey) -> WorldGrant:
        """Request a world, and return it."""
        self.request(wanted)
        grant = self.receive()
        assert grant is not None
        return grant

    def give_back(self, number: int, kill_reason: str | None = None, *, retire: bool = False) -> None:
        self.wanted.discard(number)
        del self.worlds[number]
        self.pool.call(self.pool.give_back, number, kill_reason, frozenset(range(9)), retire)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the locks."""
    locks = tmp_path / "locks"
    locks.mkdir()
    monkeypatch.setenv(VARIABLE, str(locks))

    def tell(directory: str, spec: WorldSpec, rank: int, pid: int) -> None:
        """Have a rank end its session, as the message of a retiring pool does."""
        STARTERS[directory].end(spec, rank, RETIRED)
        raise OSError

    monkeypatch.setattr(worlds, "call_rank", tell)
    return locks


def check_devices(sessions: list[SimulatedSession]) -> None:
    """Check that no device was granted beyond its capacity, or to both sessions."""
    devices: list[str] = []
    for session in sessions:
        used: defaultdict[str, float] = defaultdict(float)
        for grant in session.worlds.values():
            need = grant.spec.key.need
            share = (need.share.fraction if need and need.share else None) or 1.0
            for device in grant.spec.devices:
                used[device.id] += share
        assert all(total <= 1 for total in used.values())
        devices += used
    assert len(devices) == len(set(devices))


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
            session.pool.call(session.pool.worlds.exited, number, 0, exited(1))


@pytest.mark.parametrize("steps", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_device_is_given_twice_and_nobody_starves_whatever_drivers_do(
    folder: Path, tmp_path: Path, steps: int
) -> None:
    chance, before = random.Random(steps), threading.enumerate()  # The session of this test may have a pool, too.
    sessions = [SimulatedSession.start(tmp_path / name) for name in "ab"]
    for _ in range(steps):
        session = chance.choice(sessions)
        step(chance, session)
        receive_all(session)
        check_devices(sessions)
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
        check_devices(sessions)
    for session in sessions:
        session.pool.close(gracefully=chance.random() < 0.5)
        assert session.pool.worlds == {}
        assert session.pool.broken is None
    locks = SessionLocks(folder)
    assert [locks.lock(device) for device in DEVICES] == [True] * 4
    locks.close()
    assert [one for one in threading.enumerate() if one.name == "accel-pool" and one not in before] == []


def test_a_returned_world_goes_to_the_next_request_with_the_same_key(folder: Path, tmp_path: Path) -> None:
    session = SimulatedSession.start(tmp_path / "a")
    first = session.take(key(4))
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


def test_idle_ranks_end_if_there_are_too_many_of_them(folder: Path, tmp_path: Path) -> None:
    session = SimulatedSession.start(tmp_path / "a")
    grants = []
    for _ in range(2):
        for kind in ("one", "other"):
            grants.append(session.take(WorldKey("cpu", None, 2, grouped=True, env=((kind, ""),))))
            session.give_back(grants[-1].spec.world)
    one, _, again, _ = grants
    assert (again.spec.world, again.warm) == (one.spec.world, True)
    large = session.take(WorldKey("cpu", None, 30, grouped=True))
    session.give_back(large.spec.world)
    left = session.pool.call(lambda: list(session.pool.worlds))
    assert left == [large.spec.world], "the last one stays, however many ranks it has"
    session.pool.close(gracefully=False)


def test_a_retired_world_that_has_ended_is_not_killed_when_its_time_is_over(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "RETIRE_TIMEOUT", 0.02)
    events: list[str] = []

    def record(event: str, /, **fields: object) -> None:
        events.append(event)

    session = SimulatedSession.start(tmp_path / "a", record)
    session.give_back(session.take(CPU).spec.world, retire=True)
    while "WorldGone" not in events:
        time.sleep(0.001)
    time.sleep(0.1)
    assert events.count("WorldEnding") == 1
    session.pool.close(gracefully=False)
