"""Tests of places on a cluster: which request gets one, and when it is released. No processes are started."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.rank_exit import ExitCause
from pytest_accel.core.record_events import Recorders
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.pool.placement import ForkServer, Layout, RankMachine
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.pool_messages import PoolError, WorldGrant
from pytest_accel.pool.pooled_world import WorldState
from pytest_accel.pool.world_leases import RemoteSource
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings
from tests.features.ray.table_cluster import CROWDED, TableCluster
from tests.pool.instant_worlds import use_instant_worlds
from tests.pool.plain_workers import PlainWorkers

EIGHT = WorldKey("cpu", None, 8, grouped=True, machines=2)
"""A world that fills both nodes, which have room for four ranks each."""
FOUR = WorldKey("cpu", None, 4, grouped=True, machines=2)
TWO = WorldKey("cpu", None, 2, grouped=True, machines=2)
ON_CONTROLLER = WorldKey("cpu", None, 2, grouped=True)


class ThreeNodes:
    """The controller's node and two nodes of a cluster."""

    layout = Layout(tuple(RankMachine(f"node-{n}", f"10.0.0.{n}", (ForkServer(n, None),)) for n in range(3)))

    def __init__(self) -> None:
        self.spawns: dict[int, object] = {}
        self.remote_leases: dict[int, RemoteSource] = {}
        self.cluster = TableCluster({1: [], 2: []})


@dataclass(eq=False)
class QueueDriver:
    """A fake driver, which waits for its answers. It records the numbers of its worlds that are wanted."""

    pool: Pool
    answers: queue.SimpleQueue[WorldGrant | PoolError] = field(default_factory=queue.SimpleQueue)
    wanted: list[int] = field(default_factory=list)
    acquired: WorldGrant | None = None

    def on_wanted(self, world: int) -> None:
        self.wanted.append(world)

    def request(self, key: WorldKey) -> int:
        return self.pool.acquire(WorldDemand(key, Holder.here("a test")), self, self.answers.put)

    def get(self, key: WorldKey | None = None) -> WorldGrant:
        """Request a world if `key` is given; wait for the next answer, and return its world."""
        if key is not None:
            self.request(key)
        answer = self.answers.get(timeout=60)
        assert isinstance(answer, WorldGrant)
        self.acquired = answer
        return answer

    def release(self, kill_reason: str | None = None) -> None:
        assert self.acquired is not None
        self.pool.release(self.acquired.spec.world, kill_reason, frozenset())


@dataclass(eq=False)
class PooledCluster:
    """A pool, and the nodes of its cluster."""

    pool: Pool
    nodes: ThreeNodes

    @property
    def table(self) -> TableCluster:
        return self.nodes.cluster

    def states(self) -> list[WorldState]:
        """Return the states of all worlds, when all callbacks have run."""
        self.table.settle()
        return [world.state for world in self.pool._manager.worlds.values()]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[PooledCluster]:
    """Yield a pool whose worlds start at once, and are gone as soon as they are retired or killed."""
    folder = str(tmp_path_factory.mktemp("session"))
    spec = SessionSpec((), folder, (), folder, folder, (), (), (), (), (), distributed=False)
    nodes = ThreeNodes()
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
    machine = machine_for(Settings(accel="none", resources=(("license", 1),)))
    pool = Pool(machine, spec, 2, machines=nodes, workers=PlainWorkers(), record=Recorders())  # type: ignore[arg-type]
    use_instant_worlds(pool, monkeypatch)
    yield PooledCluster(pool, nodes)
    pool.close(gracefully=False)
    nodes.cluster.settle()
    nodes.cluster.close()
    assert sorted(nodes.cluster.released) == sorted(place.request_id for place in nodes.cluster.granted)


def test_a_world_has_the_nodes_of_its_place(cluster: PooledCluster) -> None:
    driver = QueueDriver(cluster.pool)
    spec = driver.get(TWO).spec
    assert (spec.machines, spec.servers, spec.addresses) == ((1, 2), (1, 2), ("10.0.0.1", "10.0.0.2"))
    assert driver.acquired is not None
    assert driver.acquired.hosts == ("node-1", "node-2")
    assert driver.get(ON_CONTROLLER).spec.machines == (0, 0)
    assert len(cluster.table.granted) == 1


def test_a_lease_without_a_world_needs_no_place(cluster: PooledCluster) -> None:
    driver = QueueDriver(cluster.pool)
    lease = driver.get(WorldKey("license", DeviceNeed(1, "license"), 0, grouped=False))
    assert [device.id for device in lease.spec.devices] == ["license-0"]
    assert cluster.table.granted == []


def test_an_idle_world_keeps_its_place_for_the_next_driver(cluster: PooledCluster) -> None:
    first, second = QueueDriver(cluster.pool), QueueDriver(cluster.pool)
    world = first.get(TWO).spec.world
    first.release()
    assert cluster.table.released == []
    assert (second.get(TWO).spec.world, second.acquired and second.acquired.warm) == (world, True)
    second.release("a rank hangs")
    assert cluster.table.released == [1]


def test_as_few_idle_worlds_as_possible_make_room_the_longest_idle_first(cluster: PooledCluster) -> None:
    drivers = [QueueDriver(cluster.pool) for _ in range(4)]
    worlds = [driver.get(TWO).spec.world for driver in drivers]
    for driver in (drivers[1], drivers[0], drivers[2], drivers[3]):
        driver.release()
    last = QueueDriver(cluster.pool)
    assert last.get(FOUR).spec.ranks == 4
    assert set(cluster.pool._manager.worlds) == {worlds[2], worlds[3], last.acquired and last.acquired.spec.world}


def test_a_returned_world_makes_room_for_a_waiting_request(cluster: PooledCluster) -> None:
    first, second = QueueDriver(cluster.pool), QueueDriver(cluster.pool)
    first.get(EIGHT)
    number = second.request(TWO)
    assert cluster.states() == [WorldState.IN_USE]
    assert first.wanted == [first.acquired and first.acquired.spec.world]
    assert cluster.pool.waiting(number) == f"a test waits for a place on the cluster: {CROWDED}"
    first.release()
    assert second.get().spec.ranks == 2
    assert cluster.states() == [WorldState.IN_USE]


def test_a_returned_world_is_handed_to_the_first_request_if_the_keys_are_equal(cluster: PooledCluster) -> None:
    first, second, third = (QueueDriver(cluster.pool) for _ in range(3))
    world = first.get(EIGHT).spec.world
    second.request(EIGHT)
    third.request(EIGHT)
    cluster.table.settle()
    first.release()
    assert second.get().spec.world == world
    assert second.wanted == [world]  # The third request waits.
    second.release()
    assert third.get().spec.world == world
    assert third.wanted == []
    assert len(cluster.table.granted) == 1


def test_a_returned_world_is_not_handed_to_a_later_request(cluster: PooledCluster) -> None:
    first, second, third = (QueueDriver(cluster.pool) for _ in range(3))
    world = first.get(EIGHT).spec.world
    second.request(FOUR)
    third.request(EIGHT)
    cluster.table.settle()
    first.release()
    assert second.get().spec.ranks == 4
    cluster.table.settle()
    assert third.answers.empty()
    second.release()
    assert third.get().spec.world != world


def test_a_waiting_request_is_cancelled_or_fails_with_the_reason_of_the_cluster(cluster: PooledCluster) -> None:
    first, second = QueueDriver(cluster.pool), QueueDriver(cluster.pool)
    first.get(EIGHT)
    cluster.pool.cancel(second.request(TWO))
    number = second.request(TWO)
    cluster.table.settle()
    cluster.pool.fail_if_waiting(number, "no devices came free")
    assert str(second.answers.get(timeout=60)) == f"no devices came free\n{CROWDED}"
    cluster.pool.driver_lost(first)
    assert len(cluster.table.released) == 1
    second.request(WorldKey("cpu", None, 200, grouped=True, machines=2))
    assert str(second.answers.get(timeout=60)) == "no node has room for 200 ranks"
    assert cluster.states() == []


def test_a_place_that_is_granted_after_the_cancellation_is_released(cluster: PooledCluster) -> None:
    driver = QueueDriver(cluster.pool)
    with cluster.pool._lock:  # The cluster cannot answer before the cancellation.
        cluster.pool.cancel(driver.request(TWO))
    cluster.table.settle()
    assert (len(cluster.table.granted), cluster.table.released) == (1, [1])
    assert driver.answers.empty()


def test_a_place_on_an_unknown_node_is_an_error_and_is_released(cluster: PooledCluster) -> None:
    """The cluster made the error. Without an answer, the driver would wait forever."""
    cluster.table.lose(2)
    cluster.table.add(7, [])
    driver = QueueDriver(cluster.pool)
    driver.request(TWO)
    assert "IndexError" in str(driver.answers.get(timeout=60))
    cluster.table.settle()
    assert cluster.table.released == [1]


def test_a_second_request_gets_room_once_no_world_is_ending(
    cluster: PooledCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world that is ending when the second request comes makes room for the first request."""
    manager = cluster.pool._manager
    monkeypatch.setattr(manager, "_kill_after", lambda world, seconds: None)
    drivers = [QueueDriver(cluster.pool) for _ in range(2)]
    for driver in drivers:
        driver.get(FOUR)
    for driver in drivers:
        driver.release()
    first, second = QueueDriver(cluster.pool), QueueDriver(cluster.pool)
    first.request(replace(FOUR, init=False))
    second.request(replace(FOUR, backend="gloo"))
    assert cluster.states() == [WorldState.RETIRING, WorldState.IDLE]
    cluster.pool.on_tick()
    assert cluster.states() == [WorldState.RETIRING, WorldState.IDLE]
    with cluster.pool._lock:
        manager._forget(next(iter(manager.worlds.values())))
    first.get()
    assert cluster.states() == [WorldState.IDLE, WorldState.IN_USE]
    with cluster.pool._lock:
        cluster.pool.on_tick()
    assert cluster.states() == [WorldState.RETIRING, WorldState.IN_USE]
    with cluster.pool._lock:
        manager._forget(next(iter(manager.worlds.values())))
    second.get()


def test_a_world_that_ended_with_its_fork_server_is_not_handed_over(
    cluster: PooledCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request gets the CPU slots of a world that ends with the same fork server."""
    manager = cluster.pool._manager
    first, second = QueueDriver(cluster.pool), QueueDriver(cluster.pool)
    world = first.get(ON_CONTROLLER).spec.world
    first.release()
    with monkeypatch.context() as patch:
        patch.setattr(manager, "start", lambda world: manager.worlds.update({world.spec.world: world}))
        first.request(replace(ON_CONTROLLER, init=False))
    assert cluster.states() == [WorldState.IDLE, WorldState.STARTING]
    second.request(ON_CONTROLLER)
    with cluster.pool._lock:
        manager.worlds = dict(reversed(manager.worlds.items()))
        manager._server_ended(0, None)
    assert second.get().spec.world != world
    second.release()
    assert first.get().spec.ranks == 2  # In the second attempt.


@pytest.mark.parametrize("loss", [None, "node-2 (its agent has ended)"])
def test_only_the_worlds_of_a_fork_server_end_with_it(cluster: PooledCluster, loss: str | None) -> None:
    manager = cluster.pool._manager
    first, second, third = (QueueDriver(cluster.pool) for _ in range(3))
    first.get(TWO)
    second.get(FOUR)
    second.release()
    third.get(ON_CONTROLLER)
    with cluster.pool._lock:
        manager._server_ended(2, loss)
    assert first.acquired is not None
    world = manager.worlds[first.acquired.spec.world]
    (rank_exit,) = world.exits.values()
    assert list(world.exits) == [1]
    assert (rank_exit.cause, rank_exit.about) == (
        (ExitCause.SERVER_ENDED, "") if loss is None else (ExitCause.MACHINE_LOST, "node-2 (its agent has ended)")
    )
    assert cluster.states() == [WorldState.IN_USE, WorldState.IN_USE]
    first.release()
    assert cluster.states() == [WorldState.IN_USE]
    third.release()
    assert cluster.states() == [WorldState.IDLE]
