"""A fake cluster that grants places from a table of free devices, and starts real agents on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct, structs

from pytest_accel.features.launchers.agent_client import EnvironmentChanges
from pytest_accel.features.ray.ray_cluster import ClusterStarter, RayCluster
from pytest_accel.features.ray.ray_messages import (
    AgentEnded,
    AgentStarted,
    Invitation,
    PlaceFailed,
    PlaceReserved,
    PlaceWaits,
    ReleasePlace,
    RequestPlace,
    ToHelper,
)
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.pool.starter import LocalStarter, StarterReports
from pytest_accel.settings.options import Settings
from tests.deadline import eventually

CROWDED = "all nodes are in use"
"""The reason that the cluster gives while a request waits."""


@dataclass(eq=False)
class _Free:
    """The free devices and the free rank slots of a node."""

    devices: list[str]
    ranks: int = 4


class TableCluster(RayCluster):
    """A fake cluster that serves requests in the order of their arrival. Each node has room for four ranks.

    A thread takes the place of the helper process.
    """

    def __init__(self, settings: Settings, environments: Mapping[int, Mapping[str, str]] | None = None) -> None:
        """`environments` has variables for the agents of some nodes."""
        self.settings = settings
        self.changes = EnvironmentChanges()
        ours, helper = unix_sockets.pair()
        self.connection, self._helper = Connection(ours.detach()), Connection(helper.detach())
        self.processes: list[subprocess.Popen[bytes]] = []
        """The agents, in the order of their nodes, which have the numbers 1, 2, ..."""
        self.placed: dict[int, PlaceReserved] = {}
        """The places that have not been released, by the id of the request."""
        self.granted = 0
        """The number of places that were granted."""
        self.lost: list[AgentEnded] = []
        """The ends of agents that the session has noticed."""
        self._environments = environments or {}
        self._invitation: Invitation | None = None
        self._free: dict[int, _Free] = {}
        self._lock = threading.RLock()
        self._waiting: list[RequestPlace] = []
        threading.Thread(target=self._serve_session, daemon=True).start()

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> ClusterStarter:
        self._starter = ClusterStarter(spec, here, reports, self)
        return self._starter

    def loss(self) -> str:
        return "the fake helper has ended"

    def kill(self) -> None:
        self._helper.close()

    def wait(self) -> list[int]:
        """Wait until all agents have ended, and return their exit statuses. The pool must have been closed."""
        self.connection.close()
        return [process.wait(60) for process in self.processes]

    def add(self, devices: list[str]) -> None:
        """Add a node with `devices`, start its agent, and wait until that has joined."""
        number = len(self.processes) + 1
        self._send(AgentStarted(f"node-{number}", "127.0.0.1"))
        eventually("the invitation", lambda: self._invitation)
        assert self._invitation is not None
        invitation = structs.replace(self._invitation, machine=number)
        self.processes.append(start_agent(invitation, self._environments.get(number, {})))
        eventually("the agent to join", lambda: number in self._starter.on_cluster.clients)
        with self._lock:
            self._free[number] = _Free(devices)
            self._grant()

    def lose(self, node: int) -> None:
        """Grant no more places on the node `node`."""
        with self._lock:
            self._free.pop(node, None)

    def _send(self, message: Struct) -> None:
        with self._lock:
            self._helper.send_bytes(encode(message))

    def _serve_session(self) -> None:
        try:
            while True:
                self._handle(decode(self._helper.recv_bytes(), ToHelper))
        except (EOFError, OSError):
            self._helper.close()

    def _handle(self, message: ToHelper) -> None:
        with self._lock:
            if isinstance(message, Invitation):
                self._invitation = message
            elif isinstance(message, AgentEnded):
                self.lost.append(message)
                self.lose(message.machine)
            elif isinstance(message, ReleasePlace):
                self._release(message.request_id)
            elif len(self._free) < message.key.machines:
                self._send(PlaceFailed(message.request_id, "there is no other node", False))
            else:
                self._waiting.append(message)
                self._grant()
                if message in self._waiting:
                    self._send(PlaceWaits(message.request_id, CROWDED))

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
        self._grant()

    def _grant(self) -> None:
        while self._waiting and (place := self._find(self._waiting[0])) is not None:
            self._waiting.pop(0)
            self.placed[place.request_id] = place
            self.granted += 1
            self._send(place)

    def _find(self, request: RequestPlace) -> PlaceReserved | None:
        key = request.key
        ranks_per_node = -(-key.ranks // key.machines)
        per_rank = 0 if key.need is None else key.devices_per_rank
        nodes: list[int] = []
        devices: dict[int, tuple[str, ...]] = {}
        for node, free in self._free.items():
            count = min(ranks_per_node, key.ranks - len(nodes))
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


def start_agent(invitation: Invitation, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start an agent, and return its process.

    The process ignores SIGCHLD before it becomes the agent with ``exec``, as the workers of Ray do.
    """
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    agent = f"from pytest_accel.features.ray.cluster_node import run; run({os.getpid()})"
    command = [sys.executable, "-c", ignore, sys.executable, "-c", agent]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, **environment}
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(encode(invitation))
    return process
