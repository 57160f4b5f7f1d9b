"""A fake cluster that grants places from a table of free devices, and real agents on this machine for its nodes."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pytest_accel.features.ray.cluster_machines import ClusterMachines
from pytest_accel.features.ray.cluster_starter import ClusterStarter
from pytest_accel.features.ray.ray_messages import (
    HelperFailed,
    PlaceAnswer,
    PlaceFailed,
    PlaceReserved,
    PlaceWaits,
    ReleasePlace,
    RequestPlace,
)
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.starter import StarterReports
from pytest_accel.settings.options import Settings

CROWDED = "all nodes are in use"
"""The reason that the cluster gives while a request waits."""


@dataclass(eq=False)
class _Free:
    """The free devices and the free rank slots of a node."""

    devices: list[str]
    ranks: int = 4


class TableCluster:
    """A fake cluster that serves requests in the order of their arrival. Each node has room for four ranks."""

    def __init__(self, machines: ClusterMachines, free: Mapping[int, list[str]]) -> None:
        """`free` has the devices of each node."""
        self.machines = machines
        self.on_answer: Callable[[PlaceAnswer | HelperFailed], None] = lambda answer: None
        self.placed: dict[int, PlaceReserved] = {}
        """The places that have not been released, by the id of the request."""
        self.granted = 0
        """The number of places that were granted."""
        self._free = {node: _Free(list(devices)) for node, devices in free.items()}
        self._lock = threading.RLock()
        self._waiting: list[RequestPlace] = []

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> ClusterStarter:
        return ClusterStarter(spec, here, reports, self)

    def send(self, message: RequestPlace | ReleasePlace) -> str | None:
        with self._lock:
            if isinstance(message, ReleasePlace):
                self._release(message.request_id)
            elif message.key.ranks > 99:
                self.on_answer(PlaceFailed(message.request_id, f"no node has room for {message.key.ranks} ranks"))
            elif message.avoided and self._free.keys() <= set(message.avoided):
                self.on_answer(PlaceFailed(message.request_id, "there is no other node"))
            else:
                self._waiting.append(message)
                self._serve()
                if message in self._waiting:
                    self.on_answer(PlaceWaits(message.request_id, CROWDED))
        return None

    def _release(self, request_id: int) -> None:
        self._waiting = [request for request in self._waiting if request.request_id != request_id]
        place = self.placed.pop(request_id, None)
        if place is not None:
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

    def _serve(self) -> None:
        while self._waiting and (place := self._find(self._waiting[0])) is not None:
            self._waiting.pop(0)
            self.placed[place.request_id] = place
            self.granted += 1
            self.on_answer(place)

    def _find(self, request: RequestPlace) -> PlaceReserved | None:
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
        return PlaceReserved(request.request_id, tuple(nodes), devices)


@dataclass(eq=False)
class Agents:
    """The nodes of a session, each with an agent in a separate process."""

    settings: Settings
    rootdir: str = ""
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    joined: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    """The numbers of the agents that have joined."""
    lost: queue.SimpleQueue[tuple[int, str]] = field(default_factory=queue.SimpleQueue)
    """The numbers of the agents that were lost, or might not join, and why."""

    def __post_init__(self) -> None:
        self.on_lost: Callable[[int, str], None] = lambda *lost: self.lost.put(lost)
        self.nodes = ClusterMachines(
            self.settings, self.rootdir, self.joined.put, lambda number, why: self.on_lost(number, why)
        )

    def start(self) -> int:
        """Start the agent of the next node, wait until it has joined, and return its number."""
        number = len(self.nodes.layout.machines)
        self.processes[number] = start_agent(self.nodes.expect(number, f"node-{number}", "127.0.0.1").line())
        assert self.joined.get(timeout=60) == number
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
