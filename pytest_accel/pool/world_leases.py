"""The leases of a session's worlds: where each world's devices are requested, and what is known of each lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from threading import RLock
from types import MappingProxyType
from typing import Protocol
from weakref import WeakValueDictionary

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.core.world_key import WorldKey
from pytest_accel.forkserver.server_client import Spawn, spawn_here
from pytest_accel.hardware.inventory import Inventory, Machine
from pytest_accel.leases.allocator import Allocator
from pytest_accel.leases.demand import LeaseSource, MachineDemand, WorldDemand
from pytest_accel.pool.lease_request import LeaseRequest, MachineLease
from pytest_accel.pool.place_request import PlaceRequest
from pytest_accel.pool.placement import HERE, Cluster, Layout, Place
from pytest_accel.settings.options import Settings


class RemoteSource(LeaseSource, Protocol):
    """The source of the leases of another machine. It reports to the functions that the pool sets."""

    on_wanted: Callable[[int], None]
    """Gets the number of a lease for which another request waits."""
    on_lost: Callable[[int, str], None]
    """Gets the number of a lease whose lock was lost, and the reason."""
    on_failure: Callable[[str], None]
    """Gets the traceback of an error after which the source no longer answers."""


class SessionMachines(Protocol):
    """The machines of a session."""

    @property
    def layout(self) -> Layout:
        """The present machines with their fork servers."""

    @property
    def spawns(self) -> Mapping[int, Spawn]:
        """The functions that start the present fork servers, by number."""

    @property
    def remote_leases(self) -> Mapping[int, RemoteSource]:
        """The leases on devices of all machines but the driver's, by number."""

    @property
    def cluster(self) -> Cluster | None:
        """The cluster that provides the places of worlds with devices or on several machines; None: `layout` does."""


class LaunchedMachines(SessionMachines, Protocol):
    """The machines of the processes that a launcher has started together."""

    @property
    def process(self) -> LauncherEnv:
        """This process, as the launcher has described it."""

    @property
    def about(self) -> str:
        """One line about the processes, for the header of the session."""

    def inventory(self, machine: int, kind: str, settings: Settings) -> Inventory | str:
        """Return the devices of `kind` on another machine, or why they cannot be looked up."""


class ClusterConnection(Protocol):
    """The connection of a session to a cluster."""

    @property
    def machine(self) -> Machine:
        """The devices of the cluster, in place of those of this machine."""

    @property
    def machines(self) -> SessionMachines:
        """The machines that have joined the session."""

    def close(self) -> None:
        """Disconnect. The pool must have been closed."""


class ThisMachine:
    """The machine of a session without a launcher."""

    layout = HERE
    cluster = None
    remote_leases: Mapping[int, RemoteSource] = MappingProxyType({})

    def __init__(self, spawn: Spawn = spawn_here) -> None:
        """`spawn` starts the fork server."""
        self.spawns: Mapping[int, Spawn] = {0: spawn}


class LeaseObserver(Protocol):
    """The callbacks of :class:`WorldLeases`. Each is called with the lock held."""

    def on_lease_wanted(self, lease: MachineLease) -> None:
        """Handle that another request waits for what `lease` holds; `lease.wanted` is set."""

    def on_lease_lost(self, lease: MachineLease, why: str) -> None:
        """Handle that the lock of a device of `lease` was lost; `lease.lost` is set."""


class WorldLeases:
    """Requests the leases of worlds from the machines of a session. Owned by the pool, whose lock callers hold."""

    def __init__(
        self,
        machine: Machine,
        slots: int,
        machines: SessionMachines,
        lock: RLock,
        observer: LeaseObserver,
        on_failure: Callable[[str], None],
        *,
        waits_for_busy: bool,
    ) -> None:
        """`slots` is the number of CPU slots. `waits_for_busy` is True for ``accel_busy = wait``.

        `on_failure` gets the traceback of an error that has ended a thread of another machine's leases.
        """
        self._lock = lock
        self._machines = machines
        self._cluster = machines.cluster
        self._observer = observer
        self._on_failure = on_failure
        self._here = Allocator(machine, slots, self._wanted, self._lost, waits_for_busy=waits_for_busy)
        self._leases: WeakValueDictionary[int, MachineLease] = WeakValueDictionary()
        """The leases by number, from their request until nobody refers to them."""
        self._last_number = 0
        self._unfit: dict[WorldKey, dict[int, str]] = {}
        """For each key, the machines of the cluster whose devices do not meet its needs, and why."""

    @property
    def missing(self) -> list[str]:
        """See :attr:`Allocator.missing`."""
        return self._here.missing

    def close(self) -> None:
        """Release all leases of this machine."""
        self._here.close()

    def cluster_for(self, key: WorldKey) -> Cluster | None:
        """Return the cluster if it provides the places of worlds of `key`."""
        return self._cluster if key.in_cluster else None

    def release_place(self, place: Place | None) -> None:
        """Give a place on the cluster back; no-op for None."""
        if place is not None and self._cluster is not None:
            self._cluster.release(place)

    def request(
        self,
        demand: WorldDemand,
        on_grant: Callable[[dict[int, MachineLease], Place | None], None],
        on_wait: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> LeaseRequest | PlaceRequest:
        """Return a request, to be submitted, for the place and the leases of a world.

        The callbacks are those of :class:`PlaceRequest`. A request without a place never calls `on_wait`.
        """
        cluster = self.cluster_for(demand.key)
        if cluster is None:
            parts = list(self._parts(demand))
            return LeaseRequest(self._lock, parts, lambda leases: on_grant(leases, None), on_failure)
        unfit = self._unfit.setdefault(demand.key, {})
        parts_of = partial(self._parts_of_place, demand)
        return PlaceRequest(self._lock, cluster, demand, parts_of, on_grant, on_wait, on_failure, unfit)

    def _parts(self, demand: WorldDemand) -> Iterator[MachineLease]:
        """Yield what to lease of each machine, in the order in which it is requested."""
        key = demand.key
        if key.need is None or not key.ranks:
            yield self._part(demand, 0, key.need)
            return
        layout = self._machines.layout
        needs = key.needs([seat.machine for seat in layout.seats(key.ranks, key.machines)])
        for machine in layout.order(needs):
            yield self._part(demand, machine, needs[machine])

    def _parts_of_place(self, demand: WorldDemand, place: Place) -> list[MachineLease]:
        """Return what to lease of each machine of `place`, in the order in which it is requested."""
        needs = demand.key.needs(place.machines)
        return [
            self._part(demand, machine, needs[machine], ",".join(place.devices[machine]))
            for machine in self._machines.layout.order(needs)
        ]

    def _part(
        self, demand: WorldDemand, machine: int, need: DeviceNeed | None, mask: str | None = None
    ) -> MachineLease:
        self._last_number += 1
        source = self._source(machine)
        lease = MachineLease(source, machine, MachineDemand(self._last_number, demand, need, mask))
        self._leases[lease.number] = lease
        return lease

    def _source(self, machine: int) -> LeaseSource:
        """Return the source of the leases of a machine, which may have joined since the last call."""
        if machine == 0:
            return self._here
        source = self._machines.remote_leases[machine]
        source.on_wanted, source.on_lost, source.on_failure = self._wanted, self._lost, self._on_failure
        return source

    def _wanted(self, number: int) -> None:
        with self._lock:
            lease = self._leases.get(number)
            if lease is not None:
                lease.wanted = True
                self._observer.on_lease_wanted(lease)

    def _lost(self, number: int, why: str) -> None:
        with self._lock:
            lease = self._leases.get(number)
            if lease is not None:
                lease.lost = why
                self._observer.on_lease_lost(lease, why)
