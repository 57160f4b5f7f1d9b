"""A fake cluster that grants places from a table of free devices, and real agents on this machine for its nodes."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.ray.cluster import Place
from pytest_accel.features.ray.cluster_machines import ClusterMachines
from pytest_accel.features.ray.cluster_starter import ClusterStarter
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.starter import PlaceError, StarterReports
from pytest_accel.settings.options import Settings

CROWDED = "all nodes are in use"
"""The reason that the cluster gives while a request waits."""


@dataclass(eq=False)
class _Request:
    id: int
    key: WorldKey
    on_place: Callable[[Place], None]
    on_wait: Callable[[str], None]
    avoided: Collection[int]


@dataclass(eq=False)
class _Free:
    """The free devices and the free rank slots of a node."""

    devices: list[str]
    ranks: int = 4


class TableCluster:
    """A fake cluster that serves requests in the order of their arrival. Each node has room for four ranks."""

    def __init__(self, free: Mapping[int, list[str]]) -> None:
        """Start the thread that runs callbacks; `free` has the devices of each node."""
        self.released: list[int] = []
        """The ids of the requests whose places were released."""
        self.granted: list[Place] = []
        self._free = {node: _Free(list(devices)) for node, devices in free.items()}
        self._lock = threading.RLock()
        self._waiting: list[_Request] = []
        self._last_id = 0
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="table-cluster")
        self._thread.start()

    def place(
        self,
        key: WorldKey,
        on_place: Callable[[Place], None],
        on_wait: Callable[[str], None],
        on_failure: Callable[[PlaceError], None],
        avoided: Collection[int] = (),
    ) -> int:
        with self._lock:
            self._last_id += 1
            if key.ranks > 99:
                self._calls.put(partial(on_failure, PlaceError(f"no node has room for {key.ranks} ranks")))
                return self._last_id
            if avoided and self._free.keys() <= set(avoided):
                self._calls.put(partial(on_failure, PlaceError("there is no other node")))
                return self._last_id
            self._waiting.append(_Request(self._last_id, key, on_place, on_wait, avoided))
            self._serve()
            if any(request.id == self._last_id for request in self._waiting):
                self._calls.put(partial(on_wait, CROWDED))
            return self._last_id

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self._waiting = [request for request in self._waiting if request.id != request_id]
            self._serve()

    def release(self, place: Place) -> None:
        with self._lock:
            self.released.append(place.request_id)
            for node in place.machines:
                if node in self._free:
                    self._free[node].ranks += 1
            for node, devices in place.devices.items():
                if node in self._free:
                    self._free[node].devices = sorted({*self._free[node].devices, *devices})
            self._serve()

    def add(self, node: int, devices: list[str]) -> None:
        """Add the node `node` with `devices`."""
        with self._lock:
            self._free[node] = _Free(devices)
            self._serve()

    def lose(self, node: int) -> None:
        """Grant no more places on the node `node`."""
        with self._lock:
            self._free.pop(node, None)

    def settle(self) -> None:
        """Wait until all callbacks that are queued have run."""
        self._calls.join()

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._calls.task_done()

    def _serve(self) -> None:
        while self._waiting and (place := self._find(self._waiting[0])) is not None:
            request = self._waiting.pop(0)
            self.granted.append(place)
            self._calls.put(partial(request.on_place, place))

    def _find(self, request: _Request) -> Place | None:
        key = request.key
        ranks_per_node = -(-key.ranks // key.machines)
        per_rank = 0 if key.need is None else key.devices_per_rank
        nodes: list[int] = []
        devices: dict[int, tuple[str, ...]] = {}
        for node, free in self._free.items():
            count = min(ranks_per_node, key.ranks - len(nodes))
            if node in request.avoided:
                continue
            if count and free.ranks >= count and len(free.devices) >= count * per_rank:
                nodes += [node] * count
                if per_rank:
                    devices[node] = tuple(free.devices[: count * per_rank])
        if len(nodes) < key.ranks:
            return None
        for node in nodes:
            self._free[node].ranks -= 1
        for node, taken in devices.items():
            del self._free[node].devices[: len(taken)]
        return Place(request.id, tuple(nodes), devices)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a session, as the place of its ranks."""

    machines: ClusterMachines
    cluster: TableCluster

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> ClusterStarter:
        return ClusterStarter(spec, here, self.machines, reports, self.cluster)


@dataclass(eq=False)
class Agents:
    """The nodes of a session, each with an agent in a separate process."""

    settings: Settings
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = ClusterMachines(self.settings, "")

    def start(self) -> int:
        """Start the agent of the next node, wait until it has joined, and return its number."""
        number = len(self.nodes.layout.machines)
        self.processes[number] = start_agent(self.nodes.expect(number, f"node-{number}", "127.0.0.1").line())
        joined: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.nodes.when_joined(number, lambda: joined.put(""), joined.put)
        assert joined.get(timeout=60) == ""
        return number

    def close(self) -> dict[int, int]:
        """Close the nodes, wait until all agents have ended, and return the exit status of each."""
        self.nodes.close()
        statuses = {}
        for number, process in self.processes.items():
            statuses[number] = process.wait(60)
            assert process.stdin is not None
            process.stdin.close()
        return statuses


def start_agent(invitation: bytes) -> subprocess.Popen[bytes]:
    """Start an agent, send it the line `invitation` on its standard input, and return its process.

    Standard input stays open. The process ignores SIGCHLD before it becomes the agent with ``exec``, as the workers of
    some clusters do: the agent inherits this.
    """
    source = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    program = [
        sys.executable,
        "-c",
        "import sys; from pytest_accel.features.ray.cluster_agent import main; sys.exit(main())",
    ]
    command = [sys.executable, "-c", source, *program]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(invitation)
    process.stdin.flush()
    return process
