"""The starter of ranks on the nodes of a cluster: first the place of a world, then the locks of its devices there."""

from __future__ import annotations

from asyncio import Future, get_running_loop, wait
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from pytest_accel.core import loop_tasks
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.launchers.machines_starter import MachinesTaken, StarterOnMachines
from pytest_accel.features.launchers.placement import Seat
from pytest_accel.features.ray.cluster_machines import ClusterMachines
from pytest_accel.features.ray.ray_messages import (
    HelperFailed,
    PlaceAnswer,
    PlaceFailed,
    PlaceReserved,
    PlaceWaits,
    ReleasePlace,
    RequestPlace,
)
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.leases import UnfitDevicesError
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.starter import StarterReports

_LOOK_INTERVAL = 1.0
"""Seconds after which a request that still waits for a place has more worlds make room for it."""


class Cluster(Protocol):
    """A cluster, which reserves places for worlds."""

    machines: ClusterMachines
    on_answer: Callable[[PlaceAnswer | HelperFailed], None]
    """Called with each answer, in any thread; with :class:`HelperFailed` if the connection to the cluster is lost."""

    def send(self, message: RequestPlace | ReleasePlace) -> str | None:
        """Send a message to the cluster; return why the connection to it is lost, or None."""


@dataclass(eq=False)
class PlaceTaken(MachinesTaken):
    """The place of a world, and its leases on the devices of each machine."""

    place: PlaceReserved | None = None
    place_wanted: Callable[[], bool] = lambda: False

    @property
    def wanted(self) -> bool:
        """True if another request waits for devices or for the place."""
        return self.place_wanted() or super().wanted


@dataclass(eq=False)
class _Placing:
    """A request that waits for a place on the cluster."""

    demand: WorldDemand
    placed: Future[PlaceReserved]
    why: str = ""
    """Why it waits; empty: it may get a place at once."""


class ClusterStarter(StarterOnMachines[PlaceTaken]):
    """The starter of a session on a cluster."""

    def __init__(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports, cluster: Cluster) -> None:
        super().__init__(spec, here, cluster.machines, reports)
        self._cluster = cluster
        self._loop = get_running_loop()
        cluster.on_answer = self._post
        self._ids = count(1)
        self._placing: dict[int, _Placing] = {}
        """By the id of the request."""
        self._unfit: dict[WorldKey, dict[int, str]] = {}
        """For each key, the machines whose devices do not meet its needs, and why."""

    def serves(self, key: WorldKey) -> bool:
        return key.in_cluster

    def keeps(self, key: WorldKey) -> bool:
        return True

    async def take(self, demand: WorldDemand) -> PlaceTaken:
        unfit = self._unfit.setdefault(demand.key, {})
        while True:
            avoided = frozenset(unfit)
            try:
                place = await self._place(demand, avoided)
            except PlaceError as error:
                raise PlaceError("\n".join([*unfit.values(), str(error)])) from error
            masks = {machine: ",".join(devices) for machine, devices in place.devices.items()}
            taken = PlaceTaken(demand, place=place, place_wanted=self._place_is_wanted)
            try:
                return await self._lease(taken, demand.key.needs(place.machines), masks)
            except UnfitDevicesError as error:
                if error.machine in avoided:
                    raise PlaceError(str(error)) from error
                unfit[error.machine] = str(error)

    async def _place(self, demand: WorldDemand, avoided: Collection[int]) -> PlaceReserved:
        """Wait for a place on the cluster."""
        number = next(self._ids)
        placing = self._placing[number] = _Placing(demand, self._loop.create_future())
        try:
            if (why := self._cluster.send(RequestPlace(number, demand.key, tuple(avoided)))) is not None:
                raise PlaceError(why)
            while not placing.placed.done():
                await wait([placing.placed], timeout=_LOOK_INTERVAL)
                if placing.why:
                    self._make_room(demand.key)
            return placing.placed.result()
        except BaseException:
            self._cluster.send(ReleasePlace(number))  # It may have got a place at this moment.
            raise
        finally:
            del self._placing[number]

    def _post(self, answer: PlaceAnswer | HelperFailed) -> None:
        with suppress(RuntimeError):  # The pool is closed.
            self._loop.call_soon_threadsafe(self._answer, answer)

    def _answer(self, answer: PlaceAnswer | HelperFailed) -> None:
        if isinstance(answer, HelperFailed):
            for placing in self._placing.values():
                loop_tasks.fail(placing.placed, PlaceError(answer.reason))
            return
        found = self._placing.get(answer.request_id)
        if found is None or found.placed.done():
            return  # It was cancelled, and has given back what it gets.
        match answer:
            case PlaceReserved():
                found.placed.set_result(answer)
            case PlaceWaits(_, reason):
                found.why = reason
                self._make_room(found.demand.key)
            case PlaceFailed(_, reason):
                loop_tasks.fail(found.placed, PlaceError(reason))

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
        if taken.place is not None:
            self._cluster.send(ReleasePlace(taken.place.request_id))

    def _place_is_wanted(self) -> bool:
        return any(placing.why for placing in self._placing.values())

    def _make_room(self, key: WorldKey) -> None:
        """Have worlds free as many devices, or ranks, of places as a request for `key` needs."""
        missing = _size(key)
        for taken in list(self._taken):
            if self._reports.wanted(taken):
                missing -= _size(taken.demand.key)
                if missing <= 0:
                    return

    def place(self, spec: WorldSpec, taken: PlaceTaken) -> WorldSpec:
        assert taken.place is not None
        return self._on_seats(spec, taken, [Seat(machine, machine) for machine in taken.place.machines])


def _size(key: WorldKey) -> int:
    """Return the number of devices of a world, or of its ranks if it has no devices."""
    return key.ranks if key.need is None else key.need.count
