"""The starter of ranks on several machines: those of launched processes, or of a cluster's agents."""

from __future__ import annotations

from asyncio import CancelledError, Future, get_running_loop, wait
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Protocol

from pytest_accel.core import loop_tasks
from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.launchers.cluster import Cluster, Place
from pytest_accel.features.launchers.lease_messages import MachineDemand
from pytest_accel.features.launchers.placement import Layout, Seat
from pytest_accel.features.launchers.remote_leases import (
    LostMachineError,
    RemoteDevicesError,
    RemoteLeases,
)
from pytest_accel.features.launchers.server_group import ServerGroup
from pytest_accel.forkserver.server_process import Spawn
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.leases import HeldLease, UnfitDevicesError
from pytest_accel.leases.shared_folder import LockFolderError
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.starter import LostPlaceError, PlaceError, StarterReports, Waiting

_LOOK_INTERVAL = 1.0
"""Seconds after which a request that still waits for a place has more worlds make room for it."""


class SessionMachines(Protocol):
    """The machines of a session."""

    @property
    def layout(self) -> Layout:
        """The present machines with their fork servers."""

    @property
    def spawns(self) -> Mapping[int, Spawn]:
        """The functions that start the present fork servers of other processes than this one, by number."""

    @property
    def remote_leases(self) -> Mapping[int, RemoteLeases]:
        """The leases on devices of all machines but the driver's, by number."""

    @property
    def cluster(self) -> Cluster | None:
        """The cluster that provides the places of worlds with devices or on several machines; None: `layout` does."""


@dataclass(eq=False)
class _RemotePart:
    """The lease of a world on devices of another machine."""

    source: RemoteLeases
    number: int
    devices: tuple[Device, ...] = ()
    wanted: bool = False

    def give_back(self, *, killed: bool) -> None:
        self.source.give_back(self.number, killed=killed)


@dataclass(eq=False)
class MachinesTaken:
    """The place of a world, and its leases on the devices of each machine."""

    demand: WorldDemand
    place: Place | None
    here: HeldLease | None = None
    """The lease on devices or CPU slots of this machine."""
    remote: dict[int, _RemotePart] = field(default_factory=dict)
    """By machine: the leases on devices of other machines."""
    place_wanted: Callable[[], bool] = lambda: False
    machines: tuple[int, ...] = ()
    """The machine of each rank, once the world has its place; empty: all are on this one."""

    @property
    def wanted(self) -> bool:
        """True if another request waits for devices or for the place."""
        parts = (self.here, *self.remote.values())
        return self.place_wanted() or any(part.wanted for part in parts if part is not None)


@dataclass(eq=False)
class _Placing:
    """A request that waits for a place on the cluster."""

    demand: WorldDemand
    placed: Future[Place]
    why: str = ""
    """Why it waits; empty: it may get a place at once."""
    request: int = 0
    """The id of the request at the cluster."""


class MachinesStarter:
    """The starter of a session on several machines, or with several launched processes on one."""

    def __init__(
        self, spec: SessionSpec, here: LocalStarter, machines: SessionMachines, reports: StarterReports
    ) -> None:
        self._spec = spec
        self._here = here
        self._machines = machines
        self._reports = reports
        self._servers = ServerGroup(spec, reports, self._server_ended)
        self._loop = get_running_loop()
        self._last_number = 0
        self._taken: list[MachinesTaken] = []
        self._placing: list[_Placing] = []
        self._leasing: dict[int, tuple[WorldDemand, int]] = {}
        """For each demand that waits for devices, by its id: the demand and the machine."""
        self._unfit: dict[WorldKey, dict[int, str]] = {}
        """For each key, the machines of the cluster whose devices do not meet its needs, and why."""

    @property
    def machines(self) -> tuple[str, ...]:
        return tuple(machine.name for machine in self._machines.layout.machines)

    def serves(self, key: WorldKey) -> bool:
        return self._cluster is None or key.in_cluster

    def keeps(self, key: WorldKey) -> bool:
        return key.need is not None or self._uses_cluster(key)

    def _uses_cluster(self, key: WorldKey) -> bool:
        return self._cluster is not None and key.in_cluster

    @property
    def _cluster(self) -> Cluster | None:
        return self._machines.cluster

    def warm(self) -> None:
        self._servers.run(self._spawns)

    @property
    def _spawns(self) -> Mapping[int, Spawn]:
        return {0: self._here.spawn, **self._machines.spawns}

    # Taking and returning

    def unavailable(self, demand: WorldDemand) -> str | None:
        return None if self._uses_cluster(demand.key) else self._here.unavailable(demand)

    async def take(self, demand: WorldDemand) -> MachinesTaken:
        """See :meth:`Starter.take`. The machines are asked one after the other, in an order that all sessions have.

        This prevents deadlocks: of two sessions that need the same machines, the one that gets the first machine also
        gets the others.
        """
        if not self._uses_cluster(demand.key):
            return await self._lease(demand, None)
        unfit = self._unfit.setdefault(demand.key, {})
        while True:
            avoided = frozenset(unfit)
            try:
                place = await self._place(demand, avoided)
            except PlaceError as error:
                raise PlaceError("\n".join([*unfit.values(), str(error)])) from error
            try:
                return await self._lease(demand, place)
            except UnfitDevicesError as error:
                if error.machine in avoided:
                    raise PlaceError(str(error)) from error
                unfit[error.machine] = str(error)

    async def _place(self, demand: WorldDemand, avoided: Collection[int]) -> Place:
        """Wait for a place on the cluster."""
        cluster = self._cluster
        assert cluster is not None
        placing = _Placing(demand, self._loop.create_future())
        self._placing.append(placing)

        def post(method: Callable[..., None], *arguments: object) -> None:
            self._loop.call_soon_threadsafe(method, *arguments)

        def placed(place: Place) -> None:
            if placing.placed.done():
                cluster.release(place)
            else:
                placing.placed.set_result(place)

        def waits(why: str) -> None:
            placing.why = why
            self._make_room(demand.key)

        def failed(error: PlaceError) -> None:
            loop_tasks.fail(placing.placed, error)

        placing.request = cluster.place(
            demand.key, partial(post, placed), partial(post, waits), partial(post, failed), avoided
        )
        try:
            while not placing.placed.done():
                await wait([placing.placed], timeout=_LOOK_INTERVAL)
                if placing.why:
                    self._make_room(demand.key)
            return await placing.placed
        except CancelledError:
            cluster.cancel(placing.request)
            # A cancelled future gives a place back that comes later. It may have got one at this moment.
            if not placing.placed.cancelled() and not placing.placed.cancel() and placing.placed.exception() is None:
                cluster.release(placing.placed.result())
            raise
        finally:
            self._placing.remove(placing)

    async def _lease(self, demand: WorldDemand, place: Place | None) -> MachinesTaken:
        """Lease the devices of each machine, or the CPU slots of this one."""
        taken = MachinesTaken(demand, place, place_wanted=self._place_is_wanted if place is not None else lambda: False)
        try:
            for machine, need in self._needs(demand.key, place):
                mask = None if place is None else ",".join(place.devices[machine])
                self._leasing[id(demand)] = demand, machine
                if machine:
                    self._last_number += 1
                    part = _RemotePart(self._machines.remote_leases[machine], self._last_number)
                    await self._take_remote(part, taken, machine, MachineDemand(part.number, demand, need, mask))
                    continue
                taken.here = await self._here.leases.take(demand, need=need, mask=mask)
        except BaseException as error:
            self._return(taken, killed=False)
            if isinstance(error, LockFolderError):
                raise PlaceError(str(error)) from error
            raise
        finally:
            self._leasing.pop(id(demand), None)
        self._taken.append(taken)
        return taken

    async def _take_remote(self, part: _RemotePart, taken: MachinesTaken, machine: int, demand: MachineDemand) -> None:
        def wanted() -> None:
            part.wanted = True
            self._reports.wanted(taken)

        try:
            part.devices = await part.source.take(demand, wanted, partial(self._reports.lost, taken))
        except RemoteDevicesError as error:
            is_lost = isinstance(error, LostMachineError) and taken.place is not None
            raise (LostPlaceError if is_lost else PlaceError)(str(error)) from error
        except UnfitDevicesError as error:
            raise UnfitDevicesError(str(error), machine) from error
        taken.remote[machine] = part

    def _needs(self, key: WorldKey, place: Place | None) -> Iterator[tuple[int, DeviceNeed | None]]:
        """Yield what to lease of each machine, in the order in which it is requested."""
        if key.need is None or not key.ranks:
            if place is None:
                yield 0, key.need
            return
        layout = self._machines.layout
        machines = (
            place.machines if place is not None else [seat.machine for seat in layout.seats(key.ranks, key.machines)]
        )
        needs = key.needs(machines)
        for machine in layout.order(needs):
            yield machine, needs[machine]

    def taken_with(self, lease: HeldLease) -> MachinesTaken | None:
        """Return what `lease` is a part of."""
        return next((one for one in self._taken if one.here is lease), None)

    def waiting(self, demand: WorldDemand) -> Waiting | None:
        for placing in self._placing:
            if placing.demand is demand:
                obstacles = [*self._unfit.get(demand.key, {}).values(), placing.why]
                return Waiting("a place on the cluster", obstacles) if placing.why else None
        found = self._leasing.get(id(demand))
        if found is None or not found[1]:
            return self._here.waiting(demand)
        name = self._machines.layout.machines[found[1]].name
        return Waiting(f"{self._here.leases.what(demand)} of the machine {name}", [])

    def hand_on(self, taken: MachinesTaken) -> WorldDemand | None:
        for placing in self._placing if taken.place is not None else ():
            if placing.demand.key == taken.demand.key and not placing.placed.done():
                placing.placed.cancel()
                return placing.demand
            if placing.why:
                return None
        if taken.place is not None or taken.remote or taken.here is None:
            return None
        return self._here.hand_on(taken.here)

    def describe(self, taken: MachinesTaken, *, test: str | None = None, pids: Sequence[int] | None = None) -> None:
        of_machine: dict[int, list[int]] = {}
        for machine, pid in zip(taken.machines or repeat(0), pids or (), strict=False):
            of_machine.setdefault(machine, []).append(pid)
        if taken.here is not None:
            self._here.describe(taken.here, test=test, pids=None if pids is None else of_machine.get(0, ()))
        for machine, part in taken.remote.items():
            if pids:
                part.source.describe(part.number, of_machine.get(machine, ()))

    def give_back(self, taken: MachinesTaken, *, killed: bool) -> None:
        self._taken.remove(taken)
        self._return(taken, killed=killed)

    def _return(self, taken: MachinesTaken, *, killed: bool) -> None:
        if taken.here is not None:
            self._here.give_back(taken.here, killed=killed)
        for part in taken.remote.values():
            part.give_back(killed=killed)
        if taken.place is not None and self._cluster is not None:
            self._cluster.release(taken.place)

    def _place_is_wanted(self) -> bool:
        return any(placing.why for placing in self._placing)

    def _make_room(self, key: WorldKey) -> None:
        """Have worlds free as many devices, or ranks, of places as a request for `key` needs."""
        missing = _size(key)
        for taken in [one for one in self._taken if one.place is not None]:
            if self._reports.wanted(taken):
                missing -= _size(taken.demand.key)
                if missing <= 0:
                    return

    # Starting and ending

    def place(self, spec: WorldSpec, taken: MachinesTaken) -> WorldSpec:
        key, layout = spec.key, self._machines.layout
        left = {machine: iter(part.devices) for machine, part in taken.remote.items()}
        if taken.here is not None:
            left[0] = iter(taken.here.devices)
        if taken.place is not None:
            seats = tuple(Seat(machine, machine) for machine in taken.place.machines)
        elif key.grouped:
            seats = layout.seats(key.ranks, key.machines)
        else:
            devices = taken.here.devices if taken.here is not None else ()
            return replace(spec, servers=(key.server,), devices=devices)
        machines = tuple(seat.machine for seat in seats)
        addresses = tuple(layout.machines[machine].address for machine in machines) if len(set(machines)) > 1 else ()
        devices = tuple(next(left[machine]) for machine in machines for _ in range(key.devices_per_rank if left else 0))
        servers, taken.machines = tuple(seat.server for seat in seats), machines
        return replace(spec, servers=servers, machines=machines, addresses=addresses, devices=devices)

    def start(self, spec: WorldSpec, taken: MachinesTaken) -> None:
        spawns = self._spawns
        self._servers.run({number: spawns[number] for number in sorted(spec.server_numbers)})
        self._servers.start(spec, lambda: taken.here.descriptors if taken.here is not None else ())

    def kill(self, spec: WorldSpec, after: float) -> None:
        self._servers.kill(spec, after)

    def kill_silent(self, spec: WorldSpec, ranks: Collection[int]) -> None:
        self._servers.kill_servers({spec.server_of(rank) for rank in ranks})

    def forget(self, spec: WorldSpec) -> None:
        pass

    async def stop(self) -> bool:
        return await self._servers.stop()

    def _server_ended(self, server: int, loss: str | None) -> None:
        self._reports.lost_ranks(self, server, loss)


def _size(key: WorldKey) -> int:
    """Return the number of devices of a world, or of its ranks if it has no devices."""
    return key.ranks if key.need is None else key.need.count
