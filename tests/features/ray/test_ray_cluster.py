"""Tests of places in a real Ray cluster, whose nodes are on this machine and declare GPUs."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.ray import ray_client, ray_process
from pytest_accel.features.ray.cluster import Place
from pytest_accel.features.ray.cluster_machines import ClusterMachines
from pytest_accel.features.ray.ray_client import RayCluster
from pytest_accel.features.ray.ray_messages import Connect
from pytest_accel.features.ray.ray_resources import RayMachine
from pytest_accel.hardware.inventory import KindSpec, Machine
from pytest_accel.pool.starter import PlaceError
from pytest_accel.settings.options import Settings
from tests.conftest import Surroundings
from tests.deadline import TIMEOUT, eventually
from tests.features.ray.ray_machines import RayMachines, needs_ray

# Without --long, the session in tests/features/ray covers this module's subject.
pytestmark = [pytest.mark.long, needs_ray]


@pytest.fixture(scope="session")
def machines(surroundings: Surroundings) -> Iterator[RayMachines]:
    """Yield a cluster of a head without GPUs, and nodes with 4 and 2 GPUs."""
    made = RayMachines(surroundings.environment)
    try:
        made.add(4, "A100")
        made.add(2, "H100")
        yield made
    finally:
        made.close()


class ClusterUser:
    """The part of a session that uses a Ray cluster."""

    def __init__(self, address: str) -> None:
        self.nodes = ClusterMachines(Settings(accel="sim:4"), "")
        self.cluster = RayCluster(address, self.nodes)
        self.waits: queue.SimpleQueue[str] = queue.SimpleQueue()

    def request(
        self, key: WorldKey, avoided: Collection[int] = ()
    ) -> tuple[int, queue.SimpleQueue[Place | PlaceError]]:
        """Request a place; return the number of the request and the queue that gets the answer."""
        answers: queue.SimpleQueue[Place | PlaceError] = queue.SimpleQueue()
        return self.cluster.place(key, answers.put, self.waits.put, answers.put, avoided), answers

    def place(self, key: WorldKey, avoided: Collection[int] = ()) -> Place:
        answer = self.request(key, avoided)[1].get(timeout=TIMEOUT)
        assert isinstance(answer, Place), answer
        return answer

    def failure(self, key: WorldKey, avoided: Collection[int] = ()) -> str:
        """Request a place, which must fail; return the text of the error."""
        answer = self.request(key, avoided)[1].get(timeout=TIMEOUT)
        assert isinstance(answer, PlaceError), answer
        return str(answer)

    def shortage(self, key: WorldKey) -> str | None:
        spec = KindSpec("sim", "4")
        return RayMachine(spec, self.cluster.nodes, Machine(spec), can_scale=self.cluster.can_scale).shortage(key)

    def close(self) -> None:
        self.cluster.close()
        self.nodes.close()


@contextmanager
def connected(address: str) -> Iterator[ClusterUser]:
    """Yield a session that is connected to the cluster at `address`."""
    made = ClusterUser(address)
    try:
        made.cluster.connect(TIMEOUT)
        yield made
    finally:
        made.close()


@pytest.fixture
def session(machines: RayMachines, surroundings: Surroundings) -> Iterator[ClusterUser]:
    with connected(machines.address) as made:
        yield made
    eventually("the end of the agents", lambda: not agents(surroundings))


def gpus(ranks: int, *, nodes: int = 1, name: str | None = None, kind: str = "sim") -> WorldKey:
    return WorldKey(kind, DeviceNeed(ranks, kind, name=name), ranks, True, devices_per_rank=1, machines=nodes)


def processes_with(surroundings: Surroundings, part: str) -> list[psutil.Process]:
    """Return the processes that tests have started with `part` in their command line."""
    found = []
    for process in surroundings.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if part in " ".join(process.cmdline()):
                found.append(process)
    return found


def agents(surroundings: Surroundings) -> list[psutil.Process]:
    return processes_with(surroundings, "cluster_agent")


def test_places_have_devices_of_their_own_on_nodes_whose_agents_have_joined(session: ClusterUser) -> None:
    pair = session.place(gpus(2))
    (node,) = set(pair.machines)
    assert pair.machines == (node, node)
    assert len(pair.devices[node]) == 2
    assert session.nodes.layout.machines[node].address
    spread = session.place(gpus(3, nodes=2))
    first, second = dict.fromkeys(spread.machines)
    assert first < second
    assert spread.machines in ((first, first, second), (first, second, second))
    for one in (first, second):
        assert len(spread.devices[one]) == spread.machines.count(one)
    used = [(one, device) for place in (pair, spread) for one, ids in place.devices.items() for device in ids]
    assert len(used) == len(set(used)) == 5
    assert set(session.nodes.clients) == {first, second}


def test_a_released_place_is_kept_for_a_world_of_the_same_shape(machines: RayMachines) -> None:
    with connected(machines.address) as other:
        with connected(machines.address) as session:
            before = session.place(gpus(4))
            session.cluster.release(before)
            _, answers = other.request(gpus(4))
            assert other.waits.get(timeout=TIMEOUT).startswith("4 GPU on one node of the Ray cluster")
            again = session.place(gpus(4))
            assert (again.machines, again.devices) == (before.machines, before.devices)
            assert again.request_id != before.request_id
        assert isinstance(answers.get(timeout=TIMEOUT), Place)


def test_a_request_waits_until_there_is_room(session: ClusterUser) -> None:
    places = [session.place(gpus(4)), session.place(gpus(2))]
    number, cancelled = session.request(gpus(1))
    text = "{} GPU on one node of the Ray cluster; 0 of 6 are free"
    assert session.waits.get(timeout=TIMEOUT) == text.format(1)
    session.cluster.cancel(number)
    _, answers = session.request(gpus(3))
    assert session.waits.get(timeout=TIMEOUT) == text.format(3)
    session.cluster.release(places[0])  # It was kept for a world with 4 devices, but this request needs it.
    found = answers.get(timeout=TIMEOUT)
    assert isinstance(found, Place)
    assert set(found.machines) == set(places[0].machines)
    assert cancelled.empty()


def test_an_agent_has_the_environment_of_its_node(session: ClusterUser, surroundings: Surroundings) -> None:
    session.place(gpus(4))
    (agent,) = agents(surroundings)
    environment = agent.environ()
    assert "OMP_NUM_THREADS" not in environment
    assert not {name for name in environment if name.startswith(("RAY_JOB", "RAY_RAYLET", "RAY_LD", "LD_PRELOAD"))}
    assert environment.get("PYTHONBREAKPOINT") == os.environ.get("PYTHONBREAKPOINT")
    if os.geteuid() == 0:
        assert agent.nice() == 0
        assert Path(f"/proc/{agent.pid}/oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()


def test_a_failure_names_the_node_whose_agent_does_not_join(
    session: ClusterUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect = session.nodes.expect
    (name, *_) = {node.name for node in session.cluster.nodes}
    with monkeypatch.context() as patch:
        patch.setattr(ray_client, "_JOIN_TIMEOUT", 2.0)
        # Simulates a firewall between the nodes: nothing listens at port 1.
        patch.setattr(session.nodes, "expect", lambda *given: replace(expect(*given), port=1))
        assert session.failure(gpus(4)) == f"the agent on {name} has not joined within 2 s"
    # The two attempts have used the numbers 1 and 2, and hold no GPUs.
    assert session.place(gpus(4)).machines == (3,) * 4


def test_requests_fail_if_the_helper_dies(session: ClusterUser, surroundings: Surroundings) -> None:
    session.place(gpus(4))
    session.place(gpus(2))
    _, waiting = session.request(gpus(1))
    session.waits.get(timeout=TIMEOUT)
    (helper,) = processes_with(surroundings, "ray_process")
    helper.kill()
    reason = "the connection to the Ray cluster is lost: the process that held it was killed by SIGKILL"
    assert str(waiting.get(timeout=TIMEOUT)).startswith(reason)
    assert session.failure(gpus(1)).startswith(reason)
    eventually("the end of the agents", lambda: not agents(surroundings))


def test_connecting_fails_if_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_process, "find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"ray is not installed: pip install 'pytest-accel\[ray\]'"):
        ray_process._connect(Connect("auto", "pytest-accel"))
