"""Tests of the pool: the devices of each world, and when they are returned. No processes are started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.kill import Survivor
from pytest_accel.core.paths import server_log_path
from pytest_accel.core.record_events import Recorders
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.pool import world_manager
from pytest_accel.pool.lease_request import LeaseRequest
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.pool_messages import PoolError, WorldGrant
from pytest_accel.pool.pooled_world import WorldState
from pytest_accel.pool.world_leases import ThisMachine
from pytest_accel.pool.world_manager import WorldManager, WorldStarter
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings
from tests.pool.instant_worlds import use_instant_worlds
from tests.pool.plain_workers import PlainWorkers

TWO = WorldKey("sim", DeviceNeed(2, "sim"), 2, grouped=True, devices_per_rank=1)
FOUR = WorldKey("sim", DeviceNeed(4, "sim"), 4, grouped=True, devices_per_rank=1)
ON_CPU = WorldKey("cpu", None, 2, grouped=True)
ALL = WorldKey("sim", DeviceNeed(4, "sim"), 1, grouped=False, devices_per_rank=4)
LEASE = WorldKey("sim", DeviceNeed(4, "sim"), 0, grouped=False)
FIRST_LEASE = 1
"""The number of the first lease of a pool."""


@dataclass(eq=False)
class ListDriver:
    """A fake driver, which gets all answers at once. It records them, and the numbers of its worlds that are wanted."""

    pool: Pool
    answers: list[WorldGrant | PoolError] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)

    def on_wanted(self, world: int) -> None:
        self.wanted.append(world)

    def acquire(self, key: WorldKey) -> int:
        return self.pool.acquire(WorldDemand(key, Holder.here("a test")), self, self.answers.append)

    def acquired(self) -> WorldGrant:
        """Return the world or the lease in the last answer."""
        answer = self.answers[-1]
        assert isinstance(answer, WorldGrant)
        return answer

    def release(self, kill_reason: str | None = None) -> None:
        self.pool.release(self.acquired().spec.world, kill_reason, frozenset())


@pytest.fixture
def pool(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Yield a pool whose worlds start at once, and are gone as soon as they are retired or killed."""
    folder = str(tmp_path_factory.mktemp("session"))
    spec = SessionSpec((), folder, (), folder, folder, (), (), (), (), (), distributed=False)
    made = Pool(
        machine_for(Settings(accel="sim:4")),
        spec,
        2,
        machines=ThisMachine(),
        workers=PlainWorkers,
        record=Recorders(),
    )
    use_instant_worlds(made, monkeypatch)
    yield made
    made.close(gracefully=False)


def states(pool: Pool) -> list[WorldState]:
    return [world.state for world in pool._manager.worlds.values()]


def test_a_world_has_the_devices_of_all_its_ranks(pool: Pool) -> None:
    driver = ListDriver(pool)
    driver.acquire(TWO)
    assert [device.id for device in driver.acquired().spec.devices] == ["sim-0", "sim-1"]
    assert not driver.acquired().warm


def test_an_idle_world_is_handed_to_the_next_driver(pool: Pool) -> None:
    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(TWO)
    first.release()
    second.acquire(TWO)
    assert second.acquired().spec.world == first.acquired().spec.world
    assert second.acquired().warm


def test_an_idle_world_ends_for_a_request_that_needs_its_devices(pool: Pool) -> None:
    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(TWO)
    first.release()
    second.acquire(FOUR)
    assert second.acquired().spec.ranks == 4
    assert states(pool) == [WorldState.IN_USE]


def test_a_world_is_reported_as_wanted_and_handed_to_the_waiting_request_of_the_same_key(pool: Pool) -> None:
    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(FOUR)
    number = second.acquire(FOUR)
    assert first.wanted == [first.acquired().spec.world]
    waiting = pool.waiting(number)
    assert waiting is not None
    assert waiting.startswith("a test waits for 4 sim devices: ")
    first.release()
    assert second.acquired().spec.world == first.acquired().spec.world
    assert second.wanted == []
    assert pool.waiting(number) is None


def test_a_world_that_is_released_with_a_kill_reason_is_replaced(pool: Pool) -> None:
    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(FOUR)
    second.acquire(FOUR)
    first.release("a rank hangs")
    assert second.acquired().spec.world != first.acquired().spec.world


def test_cpu_slots_are_held_for_one_test(pool: Pool) -> None:
    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(ON_CPU)
    second.acquire(ON_CPU)
    assert (len(second.answers), first.wanted) == (0, [first.acquired().spec.world])
    first.release()
    assert second.acquired().spec.world == first.acquired().spec.world
    assert second.wanted == []


def test_a_test_gets_a_lease_without_a_world_until_it_returns_it_or_its_driver_is_lost(pool: Pool) -> None:
    first, second, third = ListDriver(pool), ListDriver(pool), ListDriver(pool)
    first.acquire(LEASE)
    number = second.acquire(LEASE)
    third.acquire(LEASE)
    assert [device.id for device in first.acquired().spec.devices] == ["sim-0", "sim-1", "sim-2", "sim-3"]
    waiting = pool.waiting(number)
    assert waiting is not None
    assert waiting.startswith("a test waits for 4 sim devices: sim-0, sim-1, sim-2, sim-3 are held by pid ")
    first.release()
    first.release()
    assert (len(second.answers), len(third.answers)) == (1, 0)
    pool.driver_lost(third)
    pool.driver_lost(second)
    assert (states(pool), third.answers) == ([], [])


def test_a_world_and_a_lease_of_the_same_devices_are_not_mistaken_for_each_other(pool: Pool) -> None:
    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(ALL)
    second.acquire(LEASE)
    assert (first.wanted, second.answers) == ([first.acquired().spec.world], [])
    first.release()
    second.release()
    first.acquire(ALL)
    first.release()
    assert states(pool) == [WorldState.IDLE]
    second.acquire(LEASE)  # The idle world ends for it.
    assert states(pool) == []


def test_the_loss_of_a_lease_without_a_world_fails_the_session(pool: Pool) -> None:
    driver = ListDriver(pool)
    driver.acquire(LEASE)
    ((_, lease),) = pool._lent.values()
    pool.on_lease_lost(lease, "the lock was lost")
    assert pool.summary.errors == ["a test: the lock was lost"]


def test_a_request_that_waits_too_long_fails_with_its_obstacles(pool: Pool) -> None:
    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(FOUR)
    number = second.acquire(TWO)
    pool.fail_if_waiting(number, "no devices came free")
    pool.fail_if_waiting(number, "no devices came free")
    (answer,) = second.answers
    assert isinstance(answer, PoolError)
    assert str(answer).startswith("no devices came free\nsim-0, sim-1, sim-2, sim-3 are held by pid ")
    first.release("so that the devices are free")
    assert len(second.answers) == 1
    assert states(pool) == []


def test_a_request_that_has_failed_while_it_was_made_does_not_wait(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(FOUR)
    broker = pool._leases._here._broker("sim")
    monkeypatch.setattr(broker, "obstacles", {}.__getitem__)  # Raises a KeyError.
    number = second.acquire(FOUR)
    assert [type(answer) for answer in second.answers] == [PoolError]
    assert not broker._queue
    assert pool.waiting(number) is None


@pytest.mark.parametrize("event", ["failure", "set aside"])
def test_a_refused_request_has_one_event(pool: Pool, monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(FOUR)
    number = second.acquire(FOUR)
    events: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(pool, "_record", lambda event, **fields: events.append((event, fields)))
    if event == "failure":
        pool.on_failure("a reason")
    else:
        monkeypatch.setattr(LeaseRequest, "unavailable", "a reason")
        pool.on_tick()
    assert [str(answer) for answer in second.answers] == ["a reason"]
    assert events == [("RequestEnded", {"request": number, "why": "a reason"})]
    assert not pool._leases._here._broker("sim")._queue


def test_a_refused_request_is_cancelled_even_if_its_driver_cannot_be_answered(pool: Pool) -> None:
    def answer(_: WorldGrant | PoolError) -> None:
        raise OSError("the driver has ended")

    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(FOUR)
    number = second.acquire(FOUR)
    pool._requests[number].answer = answer
    pool.on_failure("a reason")
    assert not pool._leases._here._broker("sim")._queue


def test_the_worlds_and_requests_of_a_lost_driver_end(pool: Pool) -> None:
    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(FOUR)
    first.acquire(TWO)
    pool.driver_lost(first)
    assert states(pool) == []
    second.acquire(FOUR)
    assert second.acquired().spec.ranks == 4


def test_a_world_whose_lock_is_lost_is_ended(pool: Pool) -> None:
    driver = ListDriver(pool)
    driver.acquire(TWO)
    pool._leases._lost(FIRST_LEASE, "the lock of sim-0 was lost")
    assert pool.summary.errors == ["the lock of sim-0 was lost"]
    assert states(pool) == []


def notify_before_answer(pool: Pool, monkeypatch: pytest.MonkeyPatch, notify: Callable[[], None]) -> None:
    """Have the devices of this machine notify the pool before they answer a request, as another thread may."""
    here = pool._leases._here
    submit = here.submit

    def notify_and_submit(*args: Any) -> None:
        notify()
        submit(*args)

    monkeypatch.setattr(here, "submit", notify_and_submit)


def test_a_lease_whose_lock_is_lost_before_its_world_exists_is_not_used(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = ListDriver(pool)
    notify_before_answer(pool, monkeypatch, lambda: pool._leases._lost(FIRST_LEASE, "the lock of sim-0 was lost"))
    driver.acquire(TWO)
    (answer,) = driver.answers
    assert str(answer) == "the lock of sim-0 was lost"
    driver.acquire(FOUR)
    assert driver.acquired().spec.ranks == 4


def test_a_lease_that_is_wanted_before_its_world_exists_is_given_up_after_one_test(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = ListDriver(pool)
    notify_before_answer(pool, monkeypatch, lambda: pool._leases._wanted(FIRST_LEASE))
    driver.acquire(TWO)
    assert driver.wanted == [driver.acquired().spec.world]
    ListDriver(pool).acquire(FOUR)
    driver.release()
    (world,) = pool._manager.worlds.values()
    assert world.spec.ranks == 4


def test_a_world_is_kept_if_nobody_waits_for_its_devices_any_more(pool: Pool) -> None:
    first, second = ListDriver(pool), ListDriver(pool)
    first.acquire(TWO)
    number = second.acquire(FOUR)
    assert first.wanted == [first.acquired().spec.world]
    pool.cancel(number)
    first.release()
    assert states(pool) == [WorldState.IDLE]
    second.acquire(FOUR)
    assert second.acquired().spec.ranks == 4


def test_the_survivors_of_an_mpi_job_are_forgotten_with_the_job(pool: Pool) -> None:
    driver = ListDriver(pool)
    driver.acquire(TWO)
    number = driver.acquired().spec.world
    manager = pool._manager
    world = manager.worlds[number]
    world.record_survivors(5, (Survivor(71, 5.0, "process 71"),))
    pool.on_survivors(world)
    manager._own_starters[number] = manager._servers
    manager._own_starter_ended(world, 5)
    assert not world.survivors  # Otherwise the world would not count as ended when its driver returns it.
    assert manager._summary.errors == ["process 71 could not be killed"]


def test_an_mpi_job_that_ends_too_early_is_reported_with_its_own_log(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Callable[[], None]] = []

    def start_job(*arguments: Any) -> WorldStarter:
        ends.append(arguments[-1])
        return pool._manager._servers

    manager, driver = pool._manager, ListDriver(pool)
    monkeypatch.setattr(manager, "_starter_of_jobs", start_job)
    monkeypatch.setattr(manager, "start", partial(WorldManager.start, manager))
    Path(server_log_path(manager.directory, 0)).write_text("of another server")
    Path(server_log_path(manager.directory, world_manager._FIRST_JOB_SERVER)).write_text("of the job")
    driver.acquire(replace(ON_CPU, launcher="mpirun"))
    with manager._lock:
        ends[0]()
    (answer,) = driver.answers
    assert str(answer) == "the MPI job of the ranks has ended:\nof the job"
