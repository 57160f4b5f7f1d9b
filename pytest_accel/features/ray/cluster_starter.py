"""The starter of ranks on the nodes of a cluster: first the place of a world, then the locks of its devices there."""

from __future__ import annotations

from asyncio import Future, get_running_loop, wait
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from pytest_accel.core import loop_tasks
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.launchers.machines_starter import MachinesTaken, StarterOnMachines
from pytest_accel.features.ray.cluster_machines import ClusterMachines
from pytest_accel.features.ray.ray_messages import (
    AgentEnded,
    AgentNeeded,
    HelperFailed,
    PlaceFailed,
    PlaceReserved,
    PlaceWaits,
    ReleasePlace,
    RequestPlace,
    StartAgent,
    ToController,
    ToHelper,
)
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.leases import UnfitDevicesError
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.starter import LostPlaceError, StarterReports
from pytest_accel.settings.options import Settings

_LOOK_INTERVAL = 1.0
"""Seconds after which a request that still waits for a place has more worlds make room for it."""
_JOIN_TIMEOUT = 120.0
"""Seconds in which the agents of a place must join: Ray starts processes for them."""


class Cluster(Protocol):
    """A cluster, as its helper process reserves places there."""

    settings: Settings
    rootdir: str
    """The suite's root directory, with the same files on all machines."""
    connection: Connection
    """The connection to the helper."""

    async def end(self, reason: str | None) -> str:
        """Wait for the end of the helper, which has closed the connection; return why no request can be met any more.

        `reason` is the reason that the helper has given, or None.
        """

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
        self.on_cluster = ClusterMachines(cluster.settings, cluster.rootdir, self._machine_lost)
        super().__init__(spec, here, self.on_cluster, reports)
        self._cluster = cluster
        self._failure: str | None = None
        """Why no request can be met any more; None as long as the helper runs."""
        self._ending: object = None
        self._ids = count(1)
        self._placing: dict[int, PlaceTaken] = {}
        """The requests that wait for a place, by number."""
        self._unfit: dict[WorldKey, dict[int, str]] = {}
        """For each key, the machines whose devices do not meet its needs, and why."""
        get_running_loop().add_reader(cluster.connection, self._receive)

    def serves(self, key: WorldKey) -> bool:
        return key.in_cluster

    def keeps(self, key: WorldKey) -> bool:
        return True

    async def take(self, demand: WorldDemand) -> PlaceTaken:
        unfit = self._unfit.setdefault(demand.key, {})
        while True:
            avoided = frozenset(unfit)
            taken = PlaceTaken(demand, number=next(self._ids), waiting=self._placing)
            try:
                place = await self._place(taken, avoided)
            except LostPlaceError:  # A `PlaceError` that lets the request be repeated.
                raise
            except PlaceError as error:
                raise PlaceError("\n".join([*unfit.values(), str(error)])) from error
            masks = {machine: ",".join(devices) for machine, devices in place.devices.items()}
            try:
                return await self._lease(taken, demand.key.needs(place.machines), masks)
            except UnfitDevicesError as error:
                if error.machine in avoided:
                    raise PlaceError(str(error)) from error
                unfit[error.machine] = str(error)

    async def _place(self, taken: PlaceTaken, avoided: Collection[int]) -> PlaceReserved:
        """Wait for a place on the cluster, and for the agents of its machines."""
        if self._failure is not None:
            raise PlaceError(self._failure)
        self._placing[taken.number] = taken
        try:
            self._send(RequestPlace(taken.number, taken.demand.key, tuple(avoided)))
            while not taken.placed.done():
                await wait([taken.placed], timeout=_LOOK_INTERVAL)
                if taken.why:
                    self._make_room(taken.demand.key)
            place = taken.placed.result()
            taken.why = ""
            for machine in dict.fromkeys(place.machines):
                await self._wait_joined(machine)
            return place
        except BaseException:
            self._send(ReleasePlace(taken.number))  # The request may have got a place at this moment.
            raise
        finally:
            del self._placing[taken.number]

    async def _wait_joined(self, machine: int) -> None:
        joined = self.on_cluster.joined(machine)
        await wait([joined], timeout=_JOIN_TIMEOUT)
        if not joined.done():
            self._machine_lost(machine, f"the agent on {self.machines[machine]} has not joined in {_JOIN_TIMEOUT:g} s")
        joined.result()

    def waiting(self, demand: WorldDemand) -> tuple[str, list[str]] | None:
        for placing in self._placing.values():
            if placing.demand is demand:
                obstacles = [*self._unfit.get(demand.key, {}).values(), placing.why]
                return ("a place on the cluster", obstacles) if placing.why else None
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

    def _make_room(self, key: WorldKey) -> None:
        """Have worlds give back places with as many devices, or ranks, as a request for `key` needs."""
        missing = _size(key)
        for taken in list(self._taken):
            if self._reports.wanted(taken):
                missing -= _size(taken.demand.key)
                if missing <= 0:
                    return

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
        except BlockingIOError:  # The helper does not read, and may have got a part of the message.
            self._cluster.kill()
        except OSError:
            pass  # The helper has ended, which `_receive` notices.

    def _receive(self) -> None:
        try:
            message: ToController = decode(self._cluster.connection.recv_bytes(), ToController)
        except (EOFError, OSError):
            get_running_loop().remove_reader(self._cluster.connection)
            self._ending = loop_tasks.start(self._fail())
            return
        match message:
            case AgentNeeded(name, address):
                self._send(StartAgent(self.on_cluster.expect(name, address)))
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
                self._make_room(placing.demand.key)
            case PlaceFailed(_, reason, is_lost):
                loop_tasks.fail(placing.placed, (LostPlaceError if is_lost else PlaceError)(reason))

    async def _fail(self) -> None:
        self._failure = await self._cluster.end(self._failure)
        for placing in self._placing.values():
            loop_tasks.fail(placing.placed, PlaceError(self._failure))

    def _machine_lost(self, machine: int, why: str) -> None:
        self.on_cluster.lose(machine, why)
        self._send(AgentEnded(machine, why))


def _size(key: WorldKey) -> int:
    """Return the number of devices of a world, or of its ranks if it has no devices."""
    return key.ranks if key.need is None else key.need.count
