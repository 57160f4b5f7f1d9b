"""The pool: the only owner of a session's leases and worlds. It lives in the controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from socket import gethostname
from threading import RLock
from traceback import format_exception
from typing import NamedTuple, Protocol

from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import Device
from pytest_accel.core.record_events import Recorder
from pytest_accel.core.world_key import WorldKey
from pytest_accel.diagnostics.diagnosis import Examiner, Progress
from pytest_accel.diagnostics.inspector import WorldInspector
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.broker import BrokerError
from pytest_accel.leases.demand import LostMachineError, RemoteDevicesError, WorldDemand
from pytest_accel.leases.idle_policy import KEPT_RANKS, WANTED, IdleWorld, Wanted, to_retire
from pytest_accel.leases.shared_folder import LockFolderError
from pytest_accel.messages.rank_exit import RankExit
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.worker_input import WorkerInput
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.lease_request import LeaseRequest, MachineLease
from pytest_accel.pool.place_request import PlaceRequest
from pytest_accel.pool.placement import Place, PlaceError, Seat
from pytest_accel.pool.pool_events import device_found, world_starting
from pytest_accel.pool.pool_messages import PoolError, WorldGrant
from pytest_accel.pool.pooled_world import PooledWorld, WantedObserver, WorldRequest, WorldState
from pytest_accel.pool.summary import PoolSummary
from pytest_accel.pool.world_leases import SessionMachines, WorldLeases
from pytest_accel.pool.world_manager import StartJob, WorldManager, no_jobs


class PoolSnapshot(NamedTuple):
    """The present state of a pool."""

    waiting: list[tuple[int, str, float]]
    """Each request for a world that has not been answered, with its test and the time of the request."""
    drivers: list[tuple[int, str]]
    """Each world that a driver has or will get, with the test for which it was requested."""
    used: int
    """Number of the devices of these worlds."""
    devices: int
    """Number of all devices that are known."""


_NOTHING_WANTED = Wanted()
_NOT_REUSABLE = "no further test can use it"


class RankNumbers(Protocol):
    """The identities of ranks as xdist's workers."""

    def take(self, ranks: int) -> tuple[WorkerInput, ...]:
        """Return those of the ranks of a new world."""

    def give_back(self, inputs: tuple[WorkerInput, ...]) -> None:
        """Let other ranks have them: the processes have ended."""


class Pool:
    """The leases and worlds of one session.

    Thread-safe. Requests never block: callbacks deliver the answers. Only :meth:`close` waits.
    """

    def __init__(
        self,
        machine: Machine,
        spec: SessionSpec,
        slots: int,
        *,
        waits_for_busy: bool = False,
        workers: RankNumbers,
        machines: SessionMachines,
        record: Recorder,
        start_job: StartJob = no_jobs,
    ) -> None:
        """`slots` is the maximum number of ranks that run on the CPU at once; a larger world runs alone.

        `waits_for_busy` is True for ``accel_busy = wait``. `workers` numbers the ranks.
        The layout of `machines` is read whenever a world is placed. `record` gets the
        events of the pool. `start_job` starts the worlds that a launcher starts.
        """
        self.summary = PoolSummary(spec.directory)
        self._machine = machine
        self._slots = slots
        self._workers = workers
        self._lock = RLock()
        self._leases = WorldLeases(machine, slots, machines, self._lock, self, self.fail, waits_for_busy=waits_for_busy)
        self._manager = WorldManager(spec, self._lock, self, self.summary, lambda: machines.spawns, record, start_job)
        self._machines = machines
        self._requests: dict[int, WorldRequest] = {}
        """The requests that have not been answered, by id."""
        self._lent: dict[int, tuple[WantedObserver, MachineLease]] = {}
        """The leases without a world, with their drivers, by the number of the request."""
        self._last_number = 0
        """The last number given to a request or a world."""
        self._record = record
        self._recorded_devices: set[tuple[int, str]] = set()
        """The machine and id of each device that has an event."""
        self._recorded_machines = 0
        """The number of machines that have an event."""
        self._record_opening()

    def _record_opening(self) -> None:
        self._record("PoolOpened", slots=self._slots, kind=self._machine.session_kind)
        if self._machines.cluster is not None or len(self._machines.layout.machines) > 1:
            self._record_machines()
        if self._machines.cluster is None:  # The devices of a cluster are known once they are leased.
            for device in self._machine.session.devices:
                self._record_device(device, 0)

    def _record_machines(self) -> None:
        machines = self._machines.layout.machines
        for number in range(self._recorded_machines, len(machines)):
            self._record("MachineFound", machine=number, name=machines[number].name)
        self._recorded_machines = len(machines)

    def _record_device(self, device: Device, machine: int) -> None:
        if (machine, device.id) not in self._recorded_devices:
            self._recorded_devices.add((machine, device.id))
            self._record("DeviceFound", **device_found(device, machine))

    # Called by drivers

    def warm(self) -> None:
        """Start the fork server, so that it imports torch while tests are collected."""
        with self._lock, suppress(OSError):  # The first test that needs the server reports the error.
            self._manager.warm()

    def acquire(
        self, demand: WorldDemand, driver: WantedObserver, answer: Callable[[WorldGrant | PoolError], None]
    ) -> int:
        """Request a world; return the id of the request. `answer` may be called before this returns."""
        with self._lock:
            self._last_number += 1
            request = WorldRequest(self._last_number, demand, driver, answer)
            if demand.key.ranks:
                self._record("WorldRequested", request=request.id, test=demand.holder.test, about=demand.key.about)
            if self._manager.broken is not None:
                self._answer(request, PoolError(self._manager.broken))
                return request.id
            try:
                self._serve(request)
            except Exception as error:
                request.cancel()
                self._fail(request, error)
            return request.id

    def cancel(self, request_id: int) -> None:
        """Cancel a request, without an answer."""
        with self._lock:
            request = self._requests.pop(request_id, None)
            if request is not None:
                request.cancel()
                self._record("RequestEnded", request=request_id, why="cancelled")

    def fail_if_waiting(self, request_id: int, why: str) -> None:
        """Cancel a request that waits for leases, and answer it with an error that says `why`; no-op if it has them."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.lease_request is None:
                return
            obstacles = request.lease_request.cancel_if_waiting()
            if obstacles is not None:
                request.cancelled = True
                self._answer(request, PoolError("\n".join([why, *obstacles])))

    def waiting(self, request_id: int) -> str | None:
        """Return a line with the test, what it waits for and who holds that; None if the request waits for no lease."""
        with self._lock:
            request = self._requests.get(request_id)
            return None if request is None or request.lease_request is None else request.lease_request.waiting()

    def snapshot(self) -> PoolSnapshot:
        """Return the present state of requests, worlds and devices."""
        with self._lock:
            waiting = [
                (one.id, one.demand.holder.test, one.since) for one in self._requests.values() if one.demand.key.ranks
            ]
            states = (WorldState.STARTING, WorldState.IN_USE)
            worlds = [world for world in self._manager.worlds.values() if world.state in states]
            used = {
                (world.spec.machine_of(rank), device.id)
                for world in worlds
                for rank in range(world.spec.ranks)
                for device in world.spec.devices_of(rank)
            }
            drivers = [(one.spec.world, one.request.demand.holder.test) for one in worlds if one.request is not None]
            return PoolSnapshot(waiting, drivers, len(used), len(self._recorded_devices))

    def progress(self, number: int) -> Progress:
        """Return what the living ranks of world `number` are doing.

        This does not disturb the ranks, and may take a second.
        """
        with self._lock:
            world = self._manager.worlds.get(number)
            if world is None or world.state is not WorldState.IN_USE:
                return Progress()
            spec, alive = world.spec, world.alive
        examiner = Examiner(WorldInspector(self._manager.directory, spec), grouped=spec.grouped)
        return examiner.progress(alive)

    def cancel_waiting(self) -> list[str]:
        """Cancel all requests that wait for a lease; return the line of :meth:`waiting` for each."""
        with self._lock:
            lines = []
            for number in list(self._requests):
                if (line := self.waiting(number)) is not None:
                    lines.append(line)
                    self.cancel(number)
            return lines

    def fail(self, why: str) -> None:
        """Terminate all worlds, and answer all waiting and later requests with an error.

        Called when a thread of the session has ended; `why` has its traceback.
        """
        self._manager.fail(why)

    def release(self, number: int, kill_reason: str | None, noticed: frozenset[int], retire: bool = False) -> None:
        """Return a world, or a lease without one, that a driver has used; no-op if it does not have it any more.

        `kill_reason` says why the world must be killed. With `retire`, the world must not run another test, but its
        ranks can end their sessions. With both, how they do that is not reported.

        `noticed` are the ranks whose death the driver has reported in a test. The death of any other rank is an error
        in the session's summary: a test killed the rank and passed.
        """
        with self._lock:
            if number in self._lent:
                _, lease = self._lent.pop(number)
                # The lock file names the driver, which lives on. As long as it is named, nobody gets the device.
                with suppress(LockFolderError):
                    lease.describe(pids=())
                lease.give_back()
                return
            world = self._manager.worlds.get(number)
            if world is None or world.state is not WorldState.IN_USE:
                return
            for rank, end in world.exits.items():
                if rank not in noticed:
                    self.summary.add_death(world, rank, end)
            world.take_back()
            self._record("WorldReturned", world=number)
            if world.exits or (kill_reason is not None and not retire):
                self._manager.kill(world, kill_reason or "a rank has ended")
            elif world.spec.key.fresh or retire or self._manager.closing:
                why = kill_reason or ("its test asks for fresh ranks" if world.spec.key.fresh else _NOT_REUSABLE)
                self._manager.retire(world, why, quietly=kill_reason is not None)
            elif world.leases and world.wanted:
                if world.place is not None or not self._pass_on(world):
                    self._manager.retire(world, WANTED)
            elif world.place is not None and self._place_is_wanted():
                if not self._pass_on_place(world):
                    self._manager.retire(world, WANTED)
            else:
                world.make_idle()
            # Only after the world is idle: releasing slots may grant waiting requests synchronously.
            self._release_slots(world)
            self._retire_idle()

    def record_interrupted(self, number: int | None = None, test: str = "") -> None:
        """Record where the ranks of world `number`, which runs `test`, are; of all worlds that run a test if None."""
        with self._lock:
            for world in self._in_state(WorldState.IN_USE):
                if number in (None, world.spec.world):
                    self.summary.add_interrupted(world, test)

    def watch_exit(self, number: int, rank: int, on_exit: Callable[[RankExit | None], None]) -> None:
        """Call `on_exit` with the rank's exit status once it has ended; with None if the status is unknown."""
        with self._lock:
            self._manager.watch_exit(number, rank, on_exit)

    def driver_lost(self, driver: WantedObserver) -> None:
        """Cancel the requests of a driver whose process has ended, and terminate its worlds."""
        with self._lock:
            for request in [request for request in self._requests.values() if request.driver == driver]:
                self.cancel(request.id)
            for number, (owner, lease) in list(self._lent.items()):
                if owner == driver:  # The lock file names it: nobody gets the device before the process has ended.
                    del self._lent[number]
                    lease.give_back()
            for world in list(self._manager.worlds.values()):
                if world.request is not None and world.request.driver == driver:
                    world.request.cancelled = True
                    self.release(world.spec.world, "its driver ended", frozenset(world.exits))

    def close(self, *, gracefully: bool) -> None:
        """Terminate all worlds and the fork server, and wait until every process has ended.

        With `gracefully`, session fixtures are torn down first; the session's summary shows their errors.
        """
        with self._lock:
            for request in list(self._requests.values()):
                self.cancel(request.id)
            self._manager.end_worlds(gracefully=gracefully)
        self._manager.stop_starters()
        with self._lock:
            self.summary.devices = self._leases.missing
            self._leases.close()

    # Leases

    def on_lease_wanted(self, lease: MachineLease) -> None:
        """Retire the world that has the lease if it is idle, or notify the driver that uses it."""
        world = self._world_with(lease)
        if world is None:
            return
        world.mark_wanted()
        if world.state is WorldState.IDLE:
            self._retire_idle(Wanted(worlds=frozenset([world.spec.world])))
        elif world.state is WorldState.IN_USE and world.request is not None:
            world.request.driver.on_wanted(world.spec.world)

    def on_lease_lost(self, lease: MachineLease, why: str) -> None:
        """Kill the world that has the lease. If there is none yet, none is started.

        A test that has the lease in its driver goes on: the session reports the loss, and fails.
        """
        world = self._world_with(lease)
        if world is not None:
            self._manager.revoke(world, why)
        elif any(lent is lease for _, lent in self._lent.values()):
            self.summary.errors.append(f"{lease.demand.world.holder.test}: {why}")

    def _world_with(self, lease: MachineLease) -> PooledWorld | None:
        for world in self._manager.worlds.values():
            if any(one is lease for one in (world.slots, *world.leases.values())):
                return world
        return None

    def _serve(self, request: WorldRequest) -> None:
        """Answer `request` with a warm world, or queue a request for the leases that it needs."""
        demand, key = request.demand, request.demand.key
        self._requests[request.id] = request
        holds_lease = key.need is not None or self._leases.cluster_for(key) is not None
        world = self._manager.find_idle(request) if holds_lease else None
        if world is not None:
            if 0 in world.leases:
                world.leases[0].describe(test=demand.holder.test)
            self._hand_over(world, request)
            return
        leases = self._leases.request(
            demand, partial(self._granted, request), partial(self._place_waits, request), partial(self._fail, request)
        )
        if (why := leases.unavailable) is not None:
            self._answer(request, PoolError(why))
            return
        request.lease_request = leases
        leases.submit()
        if request.lease_request is leases and (why := leases.waiting()) is not None:
            self._record("RequestWaits", request=request.id, why=why)

    def _granted(self, request: WorldRequest, leases: dict[int, MachineLease], place: Place | None) -> None:
        request.lease_request = None
        with ExitStack() as undo:  # Return the leases after any error.
            undo.callback(self._give_back, leases, place)
            try:
                if not self._manager.closing:
                    if request.demand.key.ranks:
                        self._provide_world(request, leases, place)
                    else:
                        self._lend(request, leases[0])
                    undo.pop_all()
            except Exception as error:  # The broker's thread may run this: the driver would get no answer.
                self._fail(request, error)

    def _give_back(self, leases: Mapping[int, MachineLease], place: Place | None) -> None:
        with ExitStack() as rest:  # Returning one lease may raise.
            rest.callback(self._leases.release_place, place)
            for lease in leases.values():
                rest.callback(lease.give_back)

    def _provide_world(self, request: WorldRequest, leases: dict[int, MachineLease], place: Place | None) -> None:
        if request.demand.key.need is not None or place is not None:
            self._start(request, leases, None, place)
            return
        slots = leases[0]
        world = self._manager.find_idle(request)
        if world is None:
            self._start(request, {}, slots, None)
        else:
            world.take_slots(slots)
            self._hand_over(world, request)

    def _lend(self, request: WorldRequest, lease: MachineLease) -> None:
        """Give a lease to the driver of `request`, whose test uses it in the driver's own process."""
        if lease.lost is not None:
            raise LockFolderError(lease.lost)
        # Other sessions do not get the device before this process has ended, even if this session has ended.
        lease.describe(pids=[request.demand.holder.pid])
        self._lent[request.id] = request.driver, lease
        spec = WorldSpec(request.id, request.demand.key, devices=lease.devices)
        self._answer(request, WorldGrant(spec, (), self._manager.directory, False, request.end_wait(), ()))

    # Places on a cluster

    def _placing(self) -> Iterator[tuple[WorldRequest, PlaceRequest]]:
        """Yield the requests that wait for the cluster, the first that came first."""
        for request in list(self._requests.values()):
            if isinstance(request.lease_request, PlaceRequest) and request.lease_request.is_placing:
                yield request, request.lease_request

    def _place_is_wanted(self) -> bool:
        return any(True for _ in self._placing())

    def _pass_on_place(self, world: PooledWorld) -> bool:
        """Hand a returned world to the first request of its key that waits for a place, or keep it; True if done.

        Return False if an earlier request waits for a place: the caller must then retire the world.
        """
        for request, placing in self._placing():
            if request.demand.key == world.spec.key:
                placing.cancel()
                request.lease_request = None
                self._hand_over(world, request)
                return True
            if placing.wait_reason:
                return False
        world.make_idle()
        return True

    def _place_waits(self, request: WorldRequest) -> None:
        if request.lease_request is not None and (why := request.lease_request.waiting()) is not None:
            self._record("RequestWaits", request=request.id, why=why)
        self._make_room(request.demand.key)

    def _make_room(self, key: WorldKey) -> None:
        """Free places, since a request for `key` waits for one: retire idle worlds, have drivers return those in use.

        As many idle worlds are retired, the longest idle first, as have the number of devices (or of ranks without
        devices) that the request needs.
        """
        placed = [world for world in self._manager.worlds.values() if world.place is not None]
        self._retire_idle(Wanted(room=_size(key) - sum(_size(world.spec.key) for world in placed if world.ending)))
        for world in placed:
            if world.state is WorldState.IN_USE and world.request is not None:
                world.request.driver.on_wanted(world.spec.world)

    # Worlds

    def _hand_over(self, world: PooledWorld, request: WorldRequest) -> None:
        warm = world.state is not WorldState.STARTING
        world.hand_over(request)
        try:
            self._record("WorldAcquired", world=world.spec.world, request=request.id, reused=warm)
            hosts = self._hosts(world.spec)
            answer = WorldGrant(world.spec, world.pids, self._manager.directory, warm, request.end_wait(), hosts)
            self._answer(request, answer)
        except Exception as error:  # The driver does not know that it has the world.
            self.release(world.spec.world, "it could not be handed to its driver", frozenset())
            self._fail(request, error)
            return
        # The broker and the cluster notify once, and have done so before this driver had the world.
        if world.wanted or (world.place is not None and any(placing.wait_reason for _, placing in self._placing())):
            request.driver.on_wanted(world.spec.world)

    def _hosts(self, spec: WorldSpec) -> tuple[str, ...]:
        """Return the name of each machine of the ranks. The name of a session's only machine is empty."""
        machines = self._machines.layout.machines
        names = (machines[spec.machine_of(rank)].name or gethostname() for rank in range(spec.ranks))
        return tuple(dict.fromkeys(names))

    def _pass_on(self, world: PooledWorld) -> bool:
        """Hand a wanted world to the first request for the same key if no other is ahead of it; return True if done.

        Keep it, too, if nobody waits any more: the request for its devices may have got others, of a world that was
        ending. Otherwise each test of a row of equal ones could have a new world.
        """
        world.clear_wanted()  # The broker may report the lease as wanted by yet another request meanwhile.
        for request in self._requests.values():
            if request.demand.key == world.spec.key and isinstance(request.lease_request, LeaseRequest):
                if not request.lease_request.take_over(world.leases[0]):
                    return False
                request.lease_request = None
                self._hand_over(world, request)
                return True
        if all(lease.source.pass_on(lease.number, None) for lease in world.leases.values()):
            world.make_idle()
            return True
        return False

    def _answer(self, request: WorldRequest, answer: WorldGrant | PoolError) -> None:
        self._requests.pop(request.id, None)
        if isinstance(answer, PoolError):
            self._record("RequestEnded", request=request.id, why=str(answer))
        request.answer(answer)

    def _refuse(self, request: WorldRequest, why: str) -> None:
        """Cancel `request`, and answer it with an error that says `why`."""
        request.cancel()  # First: the answer raises if its driver has ended.
        self._answer(request, PoolError(why))

    def _fail(self, request: WorldRequest, error: Exception) -> None:
        if isinstance(error, LostMachineError) and not request.retried and self._leases.cluster_for(request.demand.key):
            request.retried = True
            self._serve(request)
            return
        expected = isinstance(error, (LockFolderError, BrokerError, RemoteDevicesError, PlaceError))
        self._answer(request, PoolError(str(error) if expected else "".join(format_exception(error))))

    def _start(
        self,
        request: WorldRequest,
        leases: Mapping[int, MachineLease],
        slots: MachineLease | None,
        place: Place | None,
    ) -> None:
        held = [*leases.values(), *([slots] if slots is not None else [])]
        for lease in held:
            if lease.lost is not None:
                raise LockFolderError(lease.lost)
        key = request.demand.key
        self._last_number += 1
        spec = self._placed(WorldSpec(self._last_number, key, self._machine.argument(key.kind)), place)
        left = {machine: iter(lease.devices) for machine, lease in leases.items()}
        ranks = range(spec.ranks) if leases else ()
        devices = tuple(next(left[spec.machine_of(rank)]) for rank in ranks for _ in range(key.devices_per_rank))
        spec = replace(spec, devices=devices, workers=self._workers.take(spec.ranks))
        if place is not None:
            self._record_machines()
        for rank in range(spec.ranks):
            for device in spec.devices_of(rank):
                self._record_device(device, spec.machine_of(rank))
        self._record("WorldStarting", **world_starting(spec, request.id))
        request.end_wait()
        world = PooledWorld(spec, request, leases, slots, place)
        self._manager.add(world)
        self._manager.start(world)

    def _placed(self, spec: WorldSpec, place: Place | None) -> WorldSpec:
        """Return `spec` with each rank's fork server, machine and address: those of `place`, else of the layout."""
        key, layout = spec.key, self._machines.layout
        if place is not None:
            seats = tuple(Seat(machine, machine) for machine in place.machines)
        elif key.grouped:
            seats = layout.seats(key.ranks, key.machines)
        else:
            return replace(spec, servers=(key.server,))
        machines = tuple(seat.machine for seat in seats)
        addresses = tuple(layout.machines[machine].address for machine in machines) if len(set(machines)) > 1 else ()
        return replace(spec, servers=tuple(seat.server for seat in seats), machines=machines, addresses=addresses)

    def _release_slots(self, world: PooledWorld) -> None:
        slots = world.drop_slots()
        if slots is not None:
            slots.give_back()

    def _retire_idle(self, wanted: Wanted = _NOTHING_WANTED) -> None:
        """Retire the idle worlds that the policy does not keep."""
        idle = [
            IdleWorld(
                world.spec.world,
                world.spec.ranks,
                world.since,
                devices=bool(world.leases) or world.place is not None,
                room=_size(world.spec.key) if world.place is not None else 0,
            )
            for world in self._in_state(WorldState.IDLE)
        ]
        for number, why in to_retire(idle, wanted, monotonic(), max(KEPT_RANKS, 2 * self._slots)):
            # The state may have changed: retiring a world may have answered a request with another one.
            world = self._manager.worlds.get(number)
            if world is not None and world.state is WorldState.IDLE:
                self._manager.retire(world, why)

    def _in_state(self, state: WorldState) -> Iterator[PooledWorld]:
        """Yield the worlds that are in `state` when their turn comes: the caller may change states meanwhile."""
        for world in list(self._manager.worlds.values()):
            if world.state is state:
                yield world

    # Called by the world manager

    def on_started(self, world: PooledWorld) -> None:
        """Hand the world, whose processes have started, to its request."""
        request = world.request
        if request is None or request.cancelled:
            self._manager.kill(world, "its request was cancelled")
            return
        pids: dict[int, list[int]] = {}
        for rank, pid in enumerate(world.pids):
            pids.setdefault(world.spec.machine_of(rank), []).append(pid)
        try:
            for machine, lease in world.leases.items():
                lease.describe(pids=pids[machine])
        except Exception as error:
            self._manager.kill(world, str(error))
            self._fail(request, error)
            return
        self._hand_over(world, request)

    def on_not_started(self, world: PooledWorld, why: str) -> None:
        """Answer the world's request with the reason."""
        if world.request is not None:
            self._answer(world.request, PoolError(why))

    def on_lost(self, world: PooledWorld, why: str) -> None:
        """Request another world for the request; answer with `why` if this was the second attempt."""
        request = world.request
        if request is None or request.cancelled:
            return
        if request.retried:
            self._answer(request, PoolError(why))
        else:
            request.retried = True
            self._serve(request)

    def on_gone(self, world: PooledWorld, *, killed: bool) -> None:
        """Return the leases of the world, whose processes have all ended."""
        self._workers.give_back(world.spec.workers)
        self._release_slots(world)
        for lease in world.leases.values():
            lease.give_back(killed=killed)
        self._leases.release_place(world.place)

    def on_survivors(self, world: PooledWorld) -> None:
        """Record in the lock files which processes live on, so that no other session gets the devices."""
        machine_of = {world.spec.server_of(rank): world.spec.machine_of(rank) for rank in range(world.spec.ranks)}
        pids: dict[int, list[int]] = {machine: [] for machine in machine_of.values()}
        for rank, pid in world.alive.items():
            pids[world.spec.machine_of(rank)].append(pid)
        for server, processes in world.survivors.items():
            # An MPI job has servers of its own, on this machine.
            machine = machine_of.get(server, world.spec.machine_of(0))
            pids[machine] += [process.pid for process in processes]
        for machine, lease in world.leases.items():
            with suppress(LockFolderError):  # This session keeps the lease.
                lease.describe(pids=pids[machine])

    def on_failure(self, why: str) -> None:
        """Answer every waiting request with `why`."""
        for request in list(self._requests.values()):
            with suppress(Exception):
                self._refuse(request, why)

    def on_tick(self) -> None:
        """Refuse requests for devices that were set aside, and retire worlds that have been idle for long.

        If a request still waits for a place, though no world is ending, free more places.
        """
        for request in list(self._requests.values()):
            why = request.lease_request.unavailable if request.lease_request is not None else None
            if why is not None:
                self._refuse(request, why)
        self._retire_idle()
        if not any(world.place is not None and world.ending for world in self._manager.worlds.values()):
            for request, placing in self._placing():
                if placing.wait_reason:
                    self._make_room(request.demand.key)
                    break


def _size(key: WorldKey) -> int:
    """Return the number of devices of a world, or of its ranks if it has no devices."""
    return key.ranks if key.need is None else key.need.count
