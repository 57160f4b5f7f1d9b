"""Worlds on a cluster: real ranks, forked by agents in other processes that stand for the nodes."""

from __future__ import annotations

import queue
import signal
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.rank_exit import ExitCause, RankExit
from pytest_accel.core.rank_messages import NodeRef
from pytest_accel.core.record_events import Recorders
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.world_key import WorldKey
from pytest_accel.diagnostics.rank_state import PHASES, RankOutcome
from pytest_accel.driver.debugger_relay import DebuggerRelay
from pytest_accel.driver.world import World
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.lock_dir import default_folder
from pytest_accel.leases.locks import DeviceLocks
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.pool_client import LocalPoolClient
from pytest_accel.pool.world_request import AcquiredWorld, PoolError
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings
from tests.faults.conftest import eventually
from tests.nodes.table_cluster import Agents, TableCluster

SETTINGS = Settings(accel="sim:4,shared")
HOLDER = Holder.here("a test")
ONE = WorldKey("sim", DeviceNeed(1, "sim"), 1, grouped=False, devices_per_rank=1)
PAIR = WorldKey("sim", DeviceNeed(2, "sim"), 2, grouped=True, devices_per_rank=1)
BOTH_NODES = WorldKey("sim", DeviceNeed(2, "sim"), 2, grouped=True, devices_per_rank=1, nodes=2)
ON_CPU = WorldKey("cpu", None, 2, grouped=True, nodes=2)
TESTS = """
    import os
    import threading

    import pytest


    def test_sum(rank, world_size, accel, gather):
        import torch
        import torch.distributed as dist

        values = torch.full((2,), rank + 1.0)
        dist.all_reduce(values)
        assert values.tolist() == [3.0, 3.0]
        assert len(set(gather(os.getppid()))) == int(os.environ["GROUP_WORLD_SIZE"])


    def test_device(accel):
        assert accel.ids == tuple(os.environ["SIM_VISIBLE_DEVICES"].split(","))
        assert len(accel.ids) == 1


    def test_endless():
        threading.Event().wait()


    def test_passes():
        pass


    def test_preloaded():
        import sys

        assert "colorsys" in sys.modules
"""


@dataclass(eq=False)
class Session:
    """A pool on a cluster, and a driver in this process for each world."""

    pool: Pool
    agents: Agents
    table: TableCluster
    suite: Path

    def ask(self, key: WorldKey) -> queue.SimpleQueue[AcquiredWorld | PoolError]:
        """Request a world; return the queue that gets the answer."""
        answers: queue.SimpleQueue[AcquiredWorld | PoolError] = queue.SimpleQueue()
        self.pool.acquire(key, HOLDER, LocalPoolClient(self.pool, print), answers.put)
        return answers

    def get(self, answers: queue.SimpleQueue[AcquiredWorld | PoolError]) -> World:
        """Return the world in the answer, whose ranks are ready."""
        answer = answers.get(timeout=120)
        assert isinstance(answer, AcquiredWorld), answer
        world = World(answer, LocalPoolClient(self.pool, print), DebuggerRelay(None, answer.spec.ranks, None))
        assert world.start() is None
        return world

    def acquire(self, key: WorldKey) -> World:
        return self.get(self.ask(key))

    def send(self, world: World, test: str) -> None:
        path = str(self.suite / "test_it.py")
        world.send(NodeRef(path, (test,)), (path, 0, test), None, last=False)

    def run(self, world: World, test: str) -> None:
        """Run a test, which must pass on all ranks."""
        self.send(world, test)
        for when in PHASES:
            assert [(one.ending, one.report) for one in world.wait(when, 60) if one.ending != "passed"] == []

    def agent(self, node: int) -> psutil.Process:
        return psutil.Process(self.agents.processes[node].pid)

    def kill(self, node: int) -> None:
        """End a node, of which the cluster learns, too."""
        self.table.lose(node)
        self.agent(node).kill()

    def exit_of(self, world: World, rank: int) -> RankExit | None:
        ends: queue.SimpleQueue[RankExit | None] = queue.SimpleQueue()
        self.pool.watch_exit(world.number, rank, ends.put)
        return ends.get(timeout=60)


def ids(world: World) -> list[str]:
    return [device.id for device in world.grant.spec.devices]


def sessions(factory: pytest.TempPathFactory, devices: Mapping[int, list[str]]) -> Iterator[Session]:
    """A session whose cluster has these devices on its nodes. What it leaves behind fails the test."""
    folder = factory.mktemp("s")
    suite = factory.mktemp("t")
    (suite / "test_it.py").write_text(textwrap.dedent(TESTS))
    (suite / "pytest.ini").write_text("[pytest]\n")
    args = ("-p", "accel", "-p", "no:cacheprovider", f"--rootdir={suite}")
    spec = SessionSpec(
        args, str(suite), tuple(sys.path), str(folder), str(suite / "tmp"), (), (), (), (), (), distributed=False
    )
    agents, table = Agents(SETTINGS), TableCluster(devices)
    agents.nodes.cluster = table
    pool = Pool(machine_for(SETTINGS), spec, 2, nodes=agents.nodes, record=Recorders())
    try:
        for _ in devices:
            agents.start()
        yield Session(pool, agents, table, suite)
    finally:
        pool.close(gracefully=False)
        statuses = agents.close()
        table.settle()
        table.close()
    assert set(statuses.values()) <= {0, -signal.SIGKILL}
    assert sorted(table.released) == sorted(place.request_id for place in table.granted)


@pytest.fixture
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A session on a cluster with two nodes, each with two devices."""
    yield from sessions(tmp_path_factory, {1: ["0", "1"], 2: ["2", "3"]})


@pytest.fixture
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A session on a cluster with one node and two of its four devices."""
    yield from sessions(tmp_path_factory, {1: ["3", "1"]})


def outcomes(world: World) -> tuple[RankOutcome, ...]:
    """Return the outcome of the test that the ranks run."""
    world.wait("setup", 60)
    return world.wait("call", 60)


def test_a_world_runs_on_the_devices_of_its_place_and_holds_their_locks(one: Session) -> None:
    other = DeviceLocks(default_folder())
    world = one.acquire(PAIR)
    assert world.grant.spec.nodes == (1, 1)
    assert sorted(ids(world)) == ["sim-1", "sim-3"]
    one.run(world, "test_sum")
    world.close()
    assert [other.try_acquire(name, HOLDER) for name in ("sim-1", "sim-3", "sim-0")] == [False, False, True]
    assert one.table.released == []

    # Another key: the idle world makes room, and a process of its own with a device is no distributed world.
    single = one.acquire(ONE)
    assert len(one.table.released) == 1
    one.run(single, "test_device")
    one.run(single, "test_device")
    single.close()
    other.close()


def test_a_place_whose_device_another_session_has_waits_for_its_lock(one: Session) -> None:
    other = DeviceLocks(default_folder())
    assert other.try_acquire("sim-3", HOLDER)
    answers = one.ask(ONE)
    one.table.settle()
    assert len(one.table.granted) == 1
    line = one.pool.waiting(1)
    assert line is not None
    assert line.startswith("a test waits for 1 sim device of the node node-1")
    assert answers.empty()
    other.close()
    world = one.get(answers)
    assert ids(world) == ["sim-3"]
    world.close()


def test_a_node_that_joins_later_preloads_what_the_others_have(one: Session) -> None:
    one.pool.warm()
    one.pool.preload(("colorsys",))
    node = one.agents.start()
    one.table.add(node, ["0", "2"])
    first, second = one.acquire(PAIR), one.acquire(PAIR)
    assert second.grant.spec.nodes == (node, node)
    one.run(second, "test_preloaded")
    for world in (first, second):
        world.close()


@pytest.mark.long
def test_a_world_on_two_nodes_and_what_is_left_when_one_of_them_ends(two: Session) -> None:
    spread = two.acquire(BOTH_NODES)
    assert (spread.grant.spec.nodes, ids(spread)) == ((1, 2), ["sim-0", "sim-2"])
    two.run(spread, "test_sum")
    other = two.acquire(ONE)
    assert (other.grant.spec.nodes, ids(other)) == ((1,), ["sim-1"])

    two.send(spread, "test_endless")
    two.send(other, "test_endless")
    two.kill(2)
    end = two.exit_of(spread, 1)
    assert end == RankExit(ExitCause.NODE_LOST, about="node-2 (its agent has ended)")
    (died,) = (outcome for outcome in outcomes(spread) if outcome.ending == "died")
    assert (died.rank, died.exit) == (1, end)
    assert two.pool._manager.worlds[other.number].exits == {}
    spread.condition.rule_out("a rank hangs")
    spread.close()
    eventually("the place of the lost world to be given back", lambda: two.table.released == [1])

    # The next world is on the node that is left.
    world = two.acquire(ONE)
    assert (world.grant.spec.nodes, ids(world)) == ((1,), ["sim-0"])
    two.run(world, "test_device")

    # A node that is added serves the next one.
    waiting = two.ask(BOTH_NODES)
    assert two.agents.start() == 3
    two.table.add(3, ["2"])
    other.condition.rule_out("it runs an endless test")
    other.close()
    spread = two.get(waiting)
    assert (spread.grant.spec.nodes, ids(spread)) == ((1, 3), ["sim-1", "sim-2"])
    two.run(spread, "test_sum")
    for one in (spread, world):
        one.close()


@pytest.mark.long
def test_a_node_that_is_lost_before_its_world_has_started_is_replaced_once(two: Session) -> None:
    """The cluster does not know of the loss: it grants the same node again, and then another."""
    agent = two.agent(1)
    agent.suspend()
    answers = two.ask(ONE)  # The agent does not answer the request for the lease.
    two.table.settle()
    agent.kill()
    answer = answers.get(timeout=60)
    assert str(answer) == "the node node-1 is lost"
    assert len(two.table.granted) == 2

    two.table.lose(1)
    agent = two.agent(2)
    agent.suspend()
    answers = two.ask(ONE)
    two.table.settle()
    two.table.lose(2)
    two.agents.start()
    two.table.add(3, ["0"])
    agent.kill()
    world = two.get(answers)
    assert world.grant.spec.nodes == (3,)
    two.run(world, "test_passes")
    world.close()


@pytest.mark.long
def test_a_node_that_is_lost_while_its_ranks_start_is_named(two: Session) -> None:
    agent = two.agent(2)
    agent.suspend()
    answers = two.ask(ON_CPU)  # The agent does not answer the request for the fork server.
    eventually("the fork server of the other node to start", lambda: two.agent(1).children(recursive=True))
    agent.kill()
    answer = answers.get(timeout=120)
    assert str(answer) == "a node of this session is lost: node-2 (its agent has ended)"
    eventually("both places to be given back", lambda: len(two.table.released) == 2)
