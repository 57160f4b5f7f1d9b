"""The pool of a session: it provides the drivers with worlds. It lives in the controller.

Everything here and in `worlds` happens in one thread, in an asyncio loop, so no state has a lock: other threads post
messages (:meth:`Pool.post`), or have a function called there and wait for its result (:meth:`Pool.call`). A request for
a world is a task (:meth:`Pool._provide`), so its cancellation undoes exactly what it has done.
"""

from __future__ import annotations

from asyncio import Task, run_coroutine_threadsafe, sleep
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count, islice
from threading import current_thread
from traceback import format_exc, format_exception
from typing import Any, TypeVar

from pytest_accel.compat import loop_tasks
from pytest_accel.compat.loop_tasks import GuardedLoop
from pytest_accel.core import session_folder, threads
from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import Device
from pytest_accel.core.processes import kill_marked
from pytest_accel.core.record_events import Recorder
from pytest_accel.core.world_key import WorldKey
from pytest_accel.diagnostics.outside_errors import OutsideError
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.shares import fraction
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.pool_client import (
    Answer,
    CancelDemand,
    DriverMessage,
    GiveBackWorld,
    PoolClient,
    PoolRequest,
    WarmServer,
    WorldGrant,
    WorldWanted,
)
from pytest_accel.pool.starter import LocalStarter, LostPlaceError, Starter, StarterReports, Taken
from pytest_accel.pool.worlds import SESSION_ENDS, WANTED, PoolDriver, PooledWorld, WorldRequest, Worlds, WorldState

WAITING_SHOWN_AFTER = 5.0
"""Seconds that a test waits before a line shows the reasons; shorter waits are normal."""
WAITING_SHOWN_AGAIN = 60.0
"""Seconds until the line is shown again."""
_TICK_INTERVAL = 1.0

Result = TypeVar("Result")


class Pool:
    """Answers the requests of the drivers with worlds. In other threads, only :meth:`close` waits long."""

    def __init__(
        self,
        machine: Machine,
        spec: SessionSpec,
        slots: int,
        *,
        wait: float | None,
        record: Recorder,
        show: Callable[[str], None],
        starters: Callable[[StarterReports], tuple[LocalStarter, Starter[Any]]],
        jobs: Callable[[LocalStarter, StarterReports], Starter[Any]] | None = None,
    ) -> None:
        """`slots` is the maximum number of ranks that run on the CPU at once; a larger world runs alone. `wait` is the
        maximum time that a request waits for devices, in seconds; None for no limit.

        `record` gets the events of the pool, and `show` lines for the terminal. `starters` is called in the pool's
        thread, and returns the starter of this machine and that of the session, which may be the same or have other
        machines, too. `jobs` is called when a test first needs an MPI job.
        """
        self.worlds = Worlds(spec.directory, slots, record, self.broken_by)
        self.requests: dict[int, WorldRequest] = {}
        """The requests that have not been answered, by id."""
        self.devices: set[tuple[str, str]] = set()
        """The machine and id of each known device."""
        self.broken: str | None = None
        """The error after which no world can be started any more, or None."""
        self._machine = machine
        self._slots = slots
        self._wait = wait
        self._first_worker = spec.first_worker
        self._record = record
        self._show = show
        self._make_jobs = jobs
        self._jobs: Starter[Any] | None = None
        """The starter of MPI jobs; None before the first job."""
        self._numbers = count(1)
        """The numbers for requests and worlds."""
        self._loop = GuardedLoop()
        self._loop.set_exception_handler(lambda loop, context: self._failed(context))
        self._tasks: list[Task[None]] = []
        """The tasks that do not belong to a request."""
        self._thread = threads.start(self._run, "accel-pool")
        try:
            self.call(self._open, starters)
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    # The thread

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(sleep(0))  # Answers the calls of other threads that came before the stop.
        finally:
            self._loop.close()

    def post(self, method: Callable[..., object], *arguments: Any) -> None:
        """Have ``method(*arguments)`` called in the pool's thread; an error in it ends all worlds."""
        with suppress(RuntimeError):  # The pool is closed.
            self._loop.call_soon_threadsafe(method, *arguments)

    def call(self, method: Callable[..., Result], *arguments: Any) -> Result:
        """Have ``method(*arguments)`` called in the pool's thread, and return its result or raise its error."""
        if current_thread() is self._thread or not self._thread.is_alive():
            return method(*arguments)

        async def run() -> Result:
            return method(*arguments)

        return run_coroutine_threadsafe(run(), self._loop).result(threads.END_TIMEOUT)

    def _open(self, starters: Callable[[StarterReports], tuple[LocalStarter, Starter[Any]]]) -> None:
        self._here, self._main = starters(self.worlds)
        self._record("PoolOpened", slots=self._slots, kind=self._machine.session_kind)
        # The devices of a cluster are known once they are used.
        for device in () if self._machine.is_cluster else self._machine.session.devices:
            self._record_device(device, self._main.machines[0])
        self._tasks = [loop_tasks.start(self._here.leases.run()), loop_tasks.start(self._tick())]

    def _failed(self, context: dict[str, Any]) -> None:
        """Terminate all worlds, because a callback or task in the pool's loop has raised an unexpected error."""
        error = context.get("exception") or RuntimeError(context.get("message"))
        why = f"the pool has ended with an error:\n{''.join(format_exception(error)).rstrip()}"
        if isinstance(error, PlaceError):  # A lock was lost.
            why = str(error)
        self.broken_by(why)

    # Called by drivers

    def serve(self, driver: PoolDriver, message: PoolRequest) -> None:
        """Handle a message of a driver."""
        match message:
            case WorldDemand():
                self._acquire(driver, message)
            case CancelDemand(number):
                for request in list(self.requests.values()):
                    if (request.driver, request.demand.number) == (driver, number):
                        self._cancel(request)
                for world in self.worlds.in_state(WorldState.IN_USE):  # The world may have been granted meanwhile.
                    if (world.request.driver, world.request.demand.number) == (driver, number):
                        self.give_back(world.spec.world, "its driver has stopped waiting for it", frozenset())
            case GiveBackWorld(world, kill_reason, noticed, retire, interrupted):
                if interrupted is not None:
                    self.record_interrupted(world, interrupted)  # Slow, but the session is ending.
                self.give_back(world, kill_reason, noticed, retire)
            case WarmServer():
                if not self.worlds.closing and self.broken is None:
                    with suppress(OSError):  # The first test that needs a server reports the error.
                        self._main.warm()

    def _acquire(self, driver: PoolDriver, demand: WorldDemand) -> None:
        request = WorldRequest(next(self._numbers), demand, driver, WAITING_SHOWN_AFTER)
        if demand.key.ranks:
            self._record("WorldRequested", request=request.id, test=demand.holder.test, about=demand.key.about)
        self.requests[request.id] = request
        request.task = self._loop.create_task(self._provide(request))

    def _cancel(self, request: WorldRequest) -> None:
        """Cancel a request, without an answer."""
        del self.requests[request.id]
        request.task.cancel()
        self._record("RequestEnded", request=request.id, why="cancelled")

    def cancel_waiting(self) -> list[str]:
        """Cancel all requests that wait for a lease; return :meth:`WorldRequest.waiting` of each."""
        lines = []
        for request in list(self.requests.values()):
            if (line := request.waiting()) is not None:
                lines.append(line)
                self._cancel(request)
        return lines

    def give_back(self, number: int, kill_reason: str | None, noticed: frozenset[int], retire: bool = False) -> None:
        """Take back a world, or a lease without ranks, that a driver has used; no-op if the driver does not have it.

        `kill_reason` says why the world must be killed. With `retire`, the world must not run another test, but its
        ranks can end their sessions. With both, errors in this are not reported.

        `noticed` are the ranks whose death the driver has reported in a test.
        """
        world = self.worlds.get(number)
        if world is None or world.state is not WorldState.IN_USE:
            return
        for rank, end in world.exits.items():
            if rank not in noticed:  # A test killed the rank and passed.
                self.worlds.add_problem(OutsideError.DIED_BETWEEN_TESTS, world, rank, end)
        self.worlds.note(world, "WorldReturned")
        if not world.starter.keeps(world.spec.key):
            world.end_lease()  # CPU slots are the test's, not the world's.
        if world.ended or world.exits or (kill_reason is not None and not retire):
            self.worlds.kill(world, kill_reason or "a rank has ended")
        elif world.spec.key.fresh or retire or self.worlds.closing:
            fresh = "its test asks for fresh ranks" if world.spec.key.fresh else "no further test can use it"
            self.worlds.retire(world, kill_reason or fresh, quietly=kill_reason is not None)
        elif world.wanted:
            self._hand_on(world)
        else:
            world.become(WorldState.IDLE)
        self.worlds.retire_idle()

    def record_interrupted(self, number: int | None = None, test: str = "") -> None:
        """Record where the ranks of world `number`, which runs `test`, are; of all worlds in use if it is None."""
        for world in self.worlds.in_state(WorldState.IN_USE):
            if number in (None, world.spec.world):
                self.worlds.add_interrupted(world, test)

    def driver_lost(self, driver: PoolDriver) -> None:
        """Cancel the requests of a driver whose process has ended, and terminate its worlds."""
        for request in [request for request in self.requests.values() if request.driver == driver]:
            self._cancel(request)
        for world in self.worlds.in_state(WorldState.IN_USE):
            if world.request.driver == driver:
                self.give_back(world.spec.world, "its driver ended", frozenset(world.exits))

    # In the caller's thread

    def close(self, *, gracefully: bool) -> None:
        """Terminate all worlds and the fork server, and wait until every process has ended.

        With `gracefully`, session fixtures are torn down first; the session's summary shows their errors.
        """
        if not self._thread.is_alive():
            return
        run_coroutine_threadsafe(self._end(gracefully=gracefully), self._loop).result(threads.END_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(threads.END_TIMEOUT)

    async def _end(self, *, gracefully: bool) -> None:
        self.worlds.closing = True
        for request in list(self.requests.values()):
            self._cancel(request)
        with ExitStack() as rest:  # An error in one step does not keep the others from being done.
            rest.callback(session_folder.remove, self.worlds.directory)
            rest.callback(self._here.leases.close)
            for task in self._tasks:
                rest.callback(task.cancel)
            await self.worlds.end(gracefully=gracefully)
            # The fork server, which kills processes that its ranks have left, may have failed.
            # The server of this machine is stopped last, since it removes the session's folder.
            stopped = [await one.stop() for one in (self._jobs, self._main, self._here) if one is not None]
            if not all(stopped) or self.broken is not None:
                with suppress(Exception):  # An unreadable /proc, for example, may be the cause of the failure.
                    self.worlds.report_left(kill_marked(self.worlds.directory))
            for world in list(self.worlds.values()):
                self.worlds.forget(world)

    def broken_by(self, why: str) -> None:
        """Terminate all worlds, and start none any more; the first reason stays."""
        if self.broken is not None:
            return
        self.broken = why
        self.worlds.errors.append(why)
        # The pool has an error, so each step may fail. The others must be done nevertheless.
        for request in list(self.requests.values()):
            with suppress(Exception):
                self._refuse(request, why)
        for world in list(self.worlds.values()):
            with suppress(Exception):
                if world.state is WorldState.IN_USE and not world.ended:
                    world.starter.kill(world.spec)  # Its driver learns how the ranks end, and gives the world back.
                else:
                    self.worlds.kill(world, why)

    # The life of a request and of its world

    async def _provide(self, request: WorldRequest) -> None:
        """Answer a request with an idle world, else with a new world or with the reason why there is none."""
        try:
            if self.broken is not None or self.worlds.closing:
                raise PlaceError(self.broken or SESSION_ENDS)
            try:
                await self._serve(request)
            except LostPlaceError:  # A machine, a fork server or the ranks were lost meanwhile: retry once.
                await self._serve(request)
        except Exception as error:
            self._answer(request, str(error) if isinstance(error, PlaceError) else format_exc())

    async def _serve(self, request: WorldRequest) -> None:
        key = request.demand.key
        starter = self._starter(key)
        # An idle world that keeps its devices needs no new lease. An idle world on the CPU needs slots for each test.
        world = self.worlds.find_idle(request) if starter.keeps(key) else None
        if world is None:
            request.starter = starter
            taken = await self._take(request, starter)
            with ExitStack() as undo:
                undo.callback(starter.leases.give_back, taken, killed=False)
                world = None if starter.keeps(key) else self.worlds.find_idle(request)
                if world is None:
                    world = self._begin(request, starter, taken)
                else:
                    world.taken = taken
                undo.pop_all()
            if world.state is WorldState.STARTING and key.ranks:
                await self.worlds.start(world)
        self._hand_over(world, request)

    def _starter(self, key: WorldKey) -> Starter[Any]:
        """Return the starter of worlds of `key`."""
        if key.launcher is not None and self._make_jobs is not None:
            if self._jobs is None:
                self._jobs = self._make_jobs(self._here, self.worlds)
            return self._jobs
        return self._main if self._main.serves(key) else self._here

    async def _take(self, request: WorldRequest, starter: Starter[Any]) -> Taken:
        """Wait for the devices or CPU slots of a world, and return them."""
        late = None
        if self._wait is not None and starter.keeps(request.demand.key):  # Only this session uses the CPU slots.
            left = max(0.0, request.since + self._wait - monotonic())
            late = self._loop.call_later(left, self._refuse_late, request)
        self._loop.call_soon(self._record_wait, request)
        try:
            taken: Taken = await starter.leases.take(request.demand)
            return taken
        finally:
            if late is not None:
                late.cancel()

    def _record_wait(self, request: WorldRequest) -> None:
        if (why := request.waiting()) is not None:
            self._record("RequestWaits", request=request.id, why=why)

    def _refuse_late(self, request: WorldRequest) -> None:
        found = request.waits_for()
        why = f"no devices came free within {self._wait:g} s (--accel-wait)"
        self._refuse(request, "\n".join([why, *(found[1] if found is not None else ())]))

    def _begin(self, request: WorldRequest, starter: Starter[Any], taken: Taken) -> PooledWorld:
        """Return a new world for `request`, which has `taken` from then on; its processes are not started yet."""
        key = request.demand.key
        here = (0,) * key.ranks
        spec = WorldSpec(next(self._numbers), key, here, here, self._machine.argument(key.kind))
        spec = starter.place(spec, taken)
        used = {number for world in self.worlds.values() for number in world.spec.workers}
        workers = tuple(islice((one for one in count(self._first_worker) if one not in used), spec.ranks))
        spec = replace(spec, workers=workers, worker_count=max((*used, *workers), default=0) + 1)
        world = self.worlds[spec.world] = PooledWorld(self.worlds.directory, spec, request, starter, taken)
        places = []
        for rank in range(spec.ranks):
            devices, machine = spec.devices_of(rank), starter.machines[spec.machines[rank]]
            for device in devices:
                self._record_device(device, machine)
            share = max((fraction(spec.share, device) for device in devices), default=1.0)
            places.append({"machine": machine, "devices": [device.id for device in devices], "share": share})
        self.worlds.note(world, "WorldStarting", request=request.id, about=key.about, places=places)
        request.waited = monotonic() - request.since
        return world

    def _hand_over(self, world: PooledWorld, request: WorldRequest) -> None:
        """Give a world to the driver of a request."""
        warm = world.state is not WorldState.STARTING
        world.become(WorldState.IN_USE)
        world.request = request
        holder, spec = request.demand.holder, world.spec
        try:
            if world.taken is not None:
                world.starter.leases.describe(world.taken, holder.test, world.pids if spec.ranks else (holder.pid,))
            self.worlds.note(world, "WorldAcquired", request=request.id, reused=warm)
            hosts = (world.starter.machines[number] for number in spec.machines)
            waited = monotonic() - request.since if request.waited is None else request.waited
            grant = WorldGrant(spec, world.pids, self.worlds.directory, warm, waited, tuple(dict.fromkeys(hosts)))
            self._answer(request, grant)
        except Exception:  # The driver does not know that it has the world.
            self.give_back(spec.world, "it could not be handed to its driver", frozenset())
            raise
        if world.wanted:  # The starter has said so once, before this driver had the world.
            request.driver.handle(WorldWanted(spec.world))

    def _hand_on(self, world: PooledWorld) -> None:
        """Give a returned world to the request that waits for its devices, if it fits; otherwise retire it."""
        assert world.taken is not None
        demand = world.starter.leases.hand_on(world.taken)
        request = next((one for one in self.requests.values() if one.demand is demand), None)
        if request is None:
            self.worlds.retire(world, WANTED)
        else:
            self._hand_over(world, request)

    def _answer(self, request: WorldRequest, answer: WorldGrant | str) -> None:
        if self.requests.pop(request.id, None) is None:
            return  # It was cancelled, or answered when it failed.
        if isinstance(answer, str):
            self._record("RequestEnded", request=request.id, why=answer)
        request.driver.handle(Answer(request.demand.number, answer))

    def _refuse(self, request: WorldRequest, why: str) -> None:
        """End the task of a request, and answer it with an error."""
        request.task.cancel()
        self._answer(request, why)

    async def _tick(self) -> None:
        """Check for silent servers and long waits every `_TICK_INTERVAL` seconds, as long as the session lives."""
        while True:
            await sleep(_TICK_INTERVAL)
            self.worlds.kill_silent_servers()
            now = monotonic()
            for request in list(self.requests.values()):
                if now - request.since >= request.show_at and (line := request.waiting()) is not None:
                    request.show_at = now - request.since + WAITING_SHOWN_AGAIN
                    self._show(f"accel: {waiting_text(line, now - request.since)}")

    # Events

    def _record_device(self, device: Device, machine: str) -> None:
        if (machine, device.id) not in self.devices:
            self.devices.add((machine, device.id))
            facts = {name: getattr(device, name) for name in ("kind", "index", "name", "memory")}
            self._record("DeviceFound", device=device.id, machine=machine, **facts)


def waiting_text(line: str, seconds: float) -> str:
    """Return the text about a test that has waited for `seconds`; `line` is from :meth:`WorldRequest.waiting`."""
    return f"{line} (for {seconds:.0f} s now)"


def client_here(pool: Pool) -> PoolClient:
    """Return the client of a driver in the controller, whose messages are calls of the pool."""

    def send(message: DriverMessage) -> None:
        pool.post(pool.serve, client, message)
        if isinstance(message, WarmServer):
            pool.call(int)  # Wait: tests may change what a server that is started later would inherit.

    client = PoolClient(send)
    return client
