"""The starter of ranks on the nodes of a cluster: first the place of a world, then the locks of its devices there."""

from __future__ import annotations

from asyncio import Future, get_running_loop, shield
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from pytest_accel.core import loop_tasks
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.launchers.agent_client import EnvironmentChanges
from pytest_accel.features.launchers.machines_starter import MachinesTaken, StarterOnMachines
from pytest_accel.features.ray.cluster_machines import ClusterMachines
from pytest_accel.features.ray.ray_messages import (
    AgentEnded,
    AgentStarted,
    HelperFailed,
    PlaceFailed,
    PlaceReserved,
    PlaceWaits,
    ReleasePlace,
    RequestPlace,
    ToController,
    ToHelper,
)
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.starter import LostPlaceError, StarterReports
from pytest_accel.settings.options import Settings


class Cluster(Protocol):
    """A cluster, as its helper process reserves places there."""

    settings: Settings
    changes: EnvironmentChanges
    """The changes of the environment since the helper was started."""
    connection: Connection
    """The connection to the helper."""

    def loss(self) -> str:
        """Return why no request can be met any more, once the helper has closed the connection."""

    def kill(self) -> None:
        """Kill the helper."""


@dataclass(eq=False)
class PlaceTaken(MachinesTaken):
    """The place of a world, or the request for it, and the leases on the devices of each machine."""

    number: int = 0
    placed: Future[PlaceReserved] = field(default_factory=lambda: get_running_loop().create_future())
    why: str = ""
    """Why the request waits; empty if it may get a place at once."""
    waiting: Mapping[int, PlaceTaken] = field(default_factory=dict)
    """The requests of the session that wait for a place."""

    @property
    def wanted(self) -> bool:
        """True if another request waits for devices or for a place."""
        return any(other.why for other in self.waiting.values()) or super().wanted


class ClusterStarter(StarterOnMachines[PlaceTaken]):
    """The starter of a session on a cluster."""

    def __init__(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports, cluster: Cluster) -> None:
        self.on_cluster = ClusterMachines(cluster.settings, cluster.changes, self._machine_lost)
        super().__init__(spec, here, self.on_cluster.machines, self.on_cluster.clients, reports)
        self._cluster = cluster
        self._failure: str | None = None
        """Why no request can be met any more; None as long as the helper runs."""
        self._ids = count(1)
        self._placing: dict[int, PlaceTaken] = {}
        """The requests that wait for a place, by number."""
        get_running_loop().add_reader(cluster.connection, self._receive)
        self._send(self.on_cluster.invitation)

    def serves(self, key: WorldKey) -> bool:
        return key.in_cluster

    def keeps(self, key: WorldKey) -> bool:
        return True

    async def take(self, demand: WorldDemand) -> PlaceTaken:
        taken = PlaceTaken(demand, number=next(self._ids), waiting=self._placing)
        place = await self._place(taken)
        masks = {machine: ",".join(devices) for machine, devices in place.devices.items()}
        return await self._lease(taken, demand.key.needs(place.machines), masks)

    async def _place(self, taken: PlaceTaken) -> PlaceReserved:
        """Wait for a place on the cluster, and for the agents of its machines."""
        if self._failure is not None:
            raise PlaceError(self._failure)
        self._placing[taken.number] = taken
        try:
            self._send(RequestPlace(taken.number, taken.demand.key))
            place = await taken.placed
            taken.why = ""
            for machine in dict.fromkeys(place.machines):
                await shield(self.on_cluster.joined(machine))
            return place
        except BaseException:
            self._send(ReleasePlace(taken.number))  # The request may have got a place at this moment.
            raise
        finally:
            del self._placing[taken.number]

    def waiting(self, demand: WorldDemand) -> tuple[str, list[str]] | None:
        for placing in self._placing.values():
            if placing.demand is demand:
                return ("a place on the cluster", [placing.why]) if placing.why else None
        return super().waiting(demand)

    def hand_on(self, taken: PlaceTaken) -> WorldDemand | None:
        for placing in self._placing.values():
            if placing.demand.key == taken.demand.key and not placing.placed.done():
                placing.placed.cancel()
                return placing.demand
            if placing.why:
                return None
        return None

    def _return(self, taken: PlaceTaken, *, killed: bool) -> None:
        super()._return(taken, killed=killed)
        self._send(ReleasePlace(taken.number))

    def place(self, spec: WorldSpec, taken: PlaceTaken) -> WorldSpec:
        return self._on_machines(spec, taken, taken.placed.result().machines)

    async def stop(self) -> bool:
        stopped = await super().stop()
        get_running_loop().remove_reader(self._cluster.connection)
        self.on_cluster.close()
        return stopped

    # The conversation with the helper

    def _send(self, message: ToHelper) -> None:
        try:
            self._cluster.connection.send_bytes(encode(message))
        except OSError:  # The helper has ended, or does not read, and may have got a part of the message.
            self._cluster.kill()

    def _receive(self) -> None:
        try:
            message: ToController = decode(self._cluster.connection.recv_bytes(), ToController)
        except (EOFError, OSError):
            get_running_loop().remove_reader(self._cluster.connection)
            self._failure = self._failure or self._cluster.loss()
            for placing in self._placing.values():
                loop_tasks.fail(placing.placed, PlaceError(self._failure))
            for machine in range(1, len(self.machines)):  # Ray ends the agents that have not joined yet.
                self.on_cluster.lose(machine, self._failure)
            return
        match message:
            case AgentStarted(name, address):
                self.on_cluster.add(name, address)
            case AgentEnded(machine, reason):
                self.on_cluster.lose(machine, reason)
            case HelperFailed(reason):
                self._failure = reason
            case PlaceReserved(request_id) | PlaceWaits(request_id) | PlaceFailed(request_id):
                found = self._placing.get(request_id)
                if found is not None and not found.placed.done():  # Else it was cancelled, and its place is given back.
                    self._answer(found, message)

    def _answer(self, placing: PlaceTaken, answer: PlaceReserved | PlaceWaits | PlaceFailed) -> None:
        match answer:
            case PlaceReserved():
                placing.placed.set_result(answer)
            case PlaceWaits(_, reason):
                placing.why = reason
                for taken in list(self._taken):  # Only the cluster knows which places would make room.
                    self._reports.wanted(taken)
            case PlaceFailed(_, reason, is_lost):
                loop_tasks.fail(placing.placed, (LostPlaceError if is_lost else PlaceError)(reason))

    def _machine_lost(self, machine: int) -> None:
        self._send(AgentEnded(machine, "the controller has lost it"))
