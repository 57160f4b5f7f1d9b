"""Tests of worlds on a cluster, with real ranks. A process of this machine simulates each node."""

from __future__ import annotations

import queue
import signal
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.node_refs import NodeRef, places
from pytest_accel.core.record_events import pass_to
from pytest_accel.core.world_key import WorldKey
from pytest_accel.diagnostics.rank_state import PHASES
from pytest_accel.diagnostics.waiting_limits import PhaseLimit
from pytest_accel.driver.debugger_relay import DebuggerRelay
from pytest_accel.driver.world import World
from pytest_accel.forkserver.server_process import spawn_here
from pytest_accel.leases.demand import Holder, WorldDemand
from pytest_accel.leases.leases import Leases
from pytest_accel.leases.locks import SessionLocks
from pytest_accel.leases.shared_folder import default_folder
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.pool.pool import Pool, client_here
from pytest_accel.pool.pool_client import (
    Answer,
    CancelDemand,
    PoolMessage,
    WorldGrant,
)
from pytest_accel.pool.starter import LocalStarter, StarterReports
from pytest_accel.settings.options import Settings, machine_for
from tests.deadline import eventually, scaled
from tests.features.ray.table_cluster import CROWDED, TableCluster
from tests.peers import forked_copy

SETTINGS = Settings(accel="sim:4,shared")
HOLDER = Holder.here("a test")
ONE = WorldKey("sim", DeviceNeed(1, "sim"), 1, grouped=False, devices_per_rank=1)
PAIR = WorldKey("sim", DeviceNeed(2, "sim"), 2, grouped=True, devices_per_rank=1)
ON_CPU = WorldKey("cpu", None, 2, grouped=True, machines=2)
LIMIT = PhaseLimit(60.0, 60.0)
TESTS = """
    import os
    import threading


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

"""


class Unconcerned:
    """A driver with one request, which keeps its world although another request waits for it."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[WorldGrant | str] = queue.SimpleQueue()

    def handle(self, message: PoolMessage) -> None:
        if isinstance(message, Answer):
            self.answers.put(message.value)


@dataclass(eq=False)
class ClusterPool:
    """A pool on a cluster. The drivers of its worlds run in this process."""

    pool: Pool
    table: TableCluster
    suite: Path
    last: Unconcerned = field(default_factory=Unconcerned)
    """The driver of the last request."""

    def request(self, key: WorldKey, timeout: float | None = None) -> queue.SimpleQueue[WorldGrant | str]:
        """Request a world; return the queue that gets the answer."""
        self.last = Unconcerned()
        self.pool.call(self.pool.serve, self.last, WorldDemand(key, HOLDER, 1, timeout))
        return self.last.answers

    def waiting(self) -> str | None:
        """Return what the last request waits for."""
        requests = self.pool.call(lambda: [one for one in self.pool.requests.values() if one.driver is self.last])
        return self.pool.call(requests[0].waiting) if requests else None

    def get(self, answers: queue.SimpleQueue[WorldGrant | str]) -> World:
        """Wait for the answer, which must be a world; return it when its ranks are ready."""
        answer = answers.get(timeout=120)
        assert isinstance(answer, WorldGrant), answer
        world = World(answer, client_here(self.pool, print), DebuggerRelay(None, answer.spec.ranks, None))
        node = NodeRef("", "", ())
        world.start(node)
        assert not world.refuses(node)
        return world

    def acquire(self, key: WorldKey) -> World:
        """Request a world, and return it when its ranks are ready."""
        return self.get(self.request(key))

    def send(self, world: World, test: str) -> None:
        """Make the ranks run `test`, without waiting for them."""
        path = str(self.suite / "test_it.py")
        node = NodeRef(path, "_pytest.python.Module", tuple(places([test], [test])))
        item = SimpleNamespace(
            name=test,
            nodeid=f"test_it.py::{test}",
            location=(path, 0, test),
            iter_markers_with_node=lambda name: (),
        )
        marked: Any = SimpleNamespace(node=node, item=item, following=None, last=False)
        world.send(marked)

    def run(self, world: World, test: str) -> None:
        """Run `test`, which must pass on all ranks."""
        self.send(world, test)
        for when in PHASES:
            assert [(rank.ending, rank.report) for rank in world.wait(when, LIMIT) if rank.ending != "passed"] == []

    def agent(self, node: int) -> psutil.Process:
        """Return the process of the agent of `node`."""
        return psutil.Process(self.table.processes[node - 1].pid)


def device_ids(world: World) -> list[str]:
    return [device.id for device in world.grant.spec.devices]


def sessions(
    factory: pytest.TempPathFactory, *devices: list[str], environments: Mapping[int, Mapping[str, str]] | None = None
) -> Iterator[ClusterPool]:
    """Yield a session whose cluster has a node for each list of `devices`; some agents have variables.

    The test fails if the session leaves an agent or a place behind.
    """
    folder = factory.mktemp("s")
    suite = factory.mktemp("t")
    (suite / "test_it.py").write_text(textwrap.dedent(TESTS))
    (suite / "pytest.ini").write_text("[pytest]\n")
    args = ("-p", "accel", "-p", "no:cacheprovider", "-p", "no:randomly", f"--rootdir={suite}")
    spec = SessionSpec(
        args,
        *(str(suite), tuple(sys.path), str(folder), str(suite / "tmp"), (), (), (), (), ()),
        distributed=False,
        worker_input={"testrunuid": "run"},
    )
    table = TableCluster(SETTINGS, environments)
    machine = machine_for(SETTINGS)

    def here(reports: StarterReports) -> LocalStarter:
        leases = Leases(machine, machine.slots, reports.wanted, reports.lost, waits_for_busy=False)
        return LocalStarter(spec, leases, spawn_here, reports)

    pool = Pool(machine, spec, 2, record=pass_to(), show=print, here=here, elsewhere=table)
    try:
        for each in devices:
            table.add(each)
        yield ClusterPool(pool, table, suite)
    finally:
        pool.close(gracefully=False)
        statuses = table.wait()
    assert set(statuses) <= {0, -signal.SIGKILL}
    assert table.placed == {}


@pytest.fixture
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterPool]:
    """Yield a session on a cluster with two nodes, each with two devices."""
    yield from sessions(tmp_path_factory, ["0", "1"], ["2", "3"])


@pytest.fixture
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterPool]:
    """Yield a session on a cluster with one node and two of its four devices."""
    yield from sessions(tmp_path_factory, ["3", "1"])


@pytest.fixture
def hidden_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterPool]:
    """Yield a session on a cluster with two nodes; the agent of the first sees only one of the two devices there."""
    masks = {1: {"SIM_VISIBLE_DEVICES": "1"}}
    yield from sessions(tmp_path_factory, ["0", "1"], ["2", "3"], environments=masks)


def test_a_world_runs_on_the_devices_of_its_place_and_holds_their_locks(one_node: ClusterPool) -> None:
    other = SessionLocks(default_folder())
    world = one_node.acquire(PAIR)
    assert world.grant.spec.machines == (1, 1)
    assert sorted(device_ids(world)) == ["sim-1", "sim-3"]
    one_node.run(world, "test_sum")
    world.close()
    assert [other.lock(name) for name in ("sim-1", "sim-3", "sim-0")] == [False, False, True]
    assert len(one_node.table.placed) == 1

    # A request with another key: the idle world makes room. A single process with a device is no distributed world.
    with forked_copy():
        single = one_node.acquire(ONE)
    eventually("the first place to be given back", lambda: 1 not in one_node.table.placed)
    one_node.run(single, "test_device")
    one_node.run(single, "test_device")
    single.close()
    other.close()


def test_a_place_whose_device_another_session_holds_waits_for_its_lock(one_node: ClusterPool) -> None:
    other = SessionLocks(default_folder())
    assert other.lock("sim-3")
    answers = one_node.request(ONE)
    waits = "a test waits for 1 sim device of the machine node-1"
    eventually("the device's lock to be awaited", lambda: str(one_node.waiting()).startswith(waits))
    assert answers.empty()
    other.close()
    world = one_node.get(answers)
    assert device_ids(world) == ["sim-3"]
    world.close()


def test_a_request_that_waits_for_a_node_is_cancelled_fails_with_the_reason_or_gets_a_returned_place(
    one_node: ClusterPool,
) -> None:
    world = one_node.acquire(PAIR)
    cancelled = one_node.request(ONE)
    one_node.pool.call(one_node.pool.serve, one_node.last, CancelDemand(1))
    failed = one_node.request(ONE, scaled(3.0))
    one_node.pool.call(int)
    waits = f"a test waits for a place on the cluster: {CROWDED}"
    eventually("the place to be awaited", lambda: one_node.waiting() == waits)
    assert str(failed.get(timeout=60)).endswith(f" (--accel-wait)\n{CROWDED}")
    served = one_node.request(ONE)
    world.close()
    single = one_node.get(served)
    one_node.run(single, "test_device")
    single.close()
    assert cancelled.empty()


def test_a_request_fails_if_the_devices_of_its_place_do_not_suffice(hidden_device: ClusterPool) -> None:
    failure = str(hidden_device.request(PAIR).get(timeout=60))
    assert failure.startswith("the cluster has reserved SIM_VISIBLE_DEVICES=0,1, but the test needs 2 sim devices")
    assert failure.endswith("(on node-1)")
    eventually("the place to be given back", lambda: not hidden_device.table.placed)


@pytest.mark.long
def test_a_node_that_is_lost_before_its_world_has_started_is_replaced_once(two_nodes: ClusterPool) -> None:
    agents = [two_nodes.agent(node) for node in (1, 2)]
    for agent in agents:
        agent.suspend()
    answers = two_nodes.request(ONE)  # The agents do not answer the request for the lease.
    eventually("a place to be granted", lambda: two_nodes.table.granted == 1)
    agents[0].kill()
    eventually("another place to be granted", lambda: two_nodes.table.granted == 2)
    agents[1].kill()
    assert str(answers.get(timeout=60)) == "the machine node-2 is lost"

    two_nodes.table.add(["0"])
    world = two_nodes.acquire(ONE)
    assert world.grant.spec.machines == (3,)
    two_nodes.run(world, "test_passes")
    world.close()


@pytest.mark.long
@pytest.mark.parametrize("node", [1, 2])
def test_a_node_that_is_lost_while_its_ranks_start_is_not_used_again(two_nodes: ClusterPool, node: int) -> None:
    """Rank 0 is on the first node, and the ranks of the other one are requested when it has started."""
    agent, other = two_nodes.agent(node), two_nodes.agent(3 - node)
    agent.suspend()
    answers = two_nodes.request(ON_CPU)  # The agent does not answer the request for the fork server.
    eventually("the fork server of the other node to start", lambda: other.children(recursive=True))
    (server,) = other.children()
    agent.kill()
    answer = answers.get(timeout=120)
    assert str(answer) == "there is no other node"
    eventually("both places to be given back", lambda: not two_nodes.table.placed)
    assert server.is_running()
    assert server.status() != psutil.STATUS_ZOMBIE
