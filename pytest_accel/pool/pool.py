"""The pool: the only owner of a session's worlds. It lives in the controller.

Everything here happens in one thread, in an asyncio loop, so no state has a lock: other threads post messages
(:meth:`Pool.post`), or have a function called there and wait for its result (:meth:`Pool.call`). A request for a world
is a task (:meth:`Pool._provide`), so its cancellation undoes exactly what it has done.
"""

from __future__ import annotations

import math
import os
import sys
from asyncio import CancelledError, Event, Task, run_coroutine_threadsafe, shield, sleep, wait_for
from asyncio import TimeoutError as WaitTimeoutError
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count, islice
from socket import gethostname
from threading import current_thread
from traceback import format_exc, format_exception
from typing import Any, TypeVar

import pytest

from pytest_accel.compat import loop_tasks
from pytest_accel.compat.loop_tasks import GuardedLoop
from pytest_accel.core import session_folder, threads
from pytest_accel.core.clock import RETIRE_TIMEOUT, START_TIMEOUT, monotonic
from pytest_accel.core.device import Device
from pytest_accel.core.processes import kill_marked
from pytest_accel.core.record_events import Recorder
from pytest_accel.core.session_folder import server_log_path
from pytest_accel.core.threads import NoThreadError
from pytest_accel.core.truncation import tail
from pytest_accel.core.world_key import WorldKey
from pytest_accel.diagnostics.diagnosis import OutsideError
from pytest_accel.diagnostics.inspector import MachineInspector, WorldInspector
from pytest_accel.forkserver.server_messages import RankExited, ServerNotice, ServerReport, WorldStarted
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.shares import fraction
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages.connect import call_rank
from pytest_accel.messages.rank_messages import FAILED_BY_HOOK, RETIRED, Command, ExitCause, RankExit, exited
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.pool_client import (
    Answer,
    CancelDemand,
    Channel,
    DriverMessage,
    GiveBackWorld,
    PoolClient,
    PoolMessage,
    PoolRequest,
    ShowLine,
    WarmServer,
    WorldGrant,
    WorldWanted,
)
from pytest_accel.pool.pooled_world import (
    PoolDriver,
    PooledWorld,
    PoolSummary,
    WorldRequest,
    WorldState,
)
from pytest_accel.pool.starter import (
    Elsewhere,
    LocalStarter,
    LostPlaceError,
    Starter,
    StarterReports,
    Taken,
)

WAITING_SHOWN_AFTER = 5.0
"""Seconds that a test waits before a line shows the reasons; shorter waits are normal."""
WAITING_SHOWN_AGAIN = 60.0
"""Seconds until the line is shown again."""
KEPT_RANKS = 16
"""Number of idle ranks to keep; with more than eight CPU slots the pool keeps two for each slot.

Each has a process with torch in it: some 100 MB that it does not share.
"""
_QUIET_TIMEOUT = 5.0
"""Takes the place of `RETIRE_TIMEOUT` for ranks that have failed their test after a timeout, or torn down before."""
_REPORTING_TIMEOUT = 10.0
"""Seconds in which the starters, at the end of the session, must report the ranks that they have killed."""
_ANSWER_TIMEOUT = 30.0
"""Seconds after the kill of a world in which its end must be reported.

A fork server that does not report it is stopped (SIGSTOP) or hangs.
"""
_TICK_INTERVAL = 1.0
_SESSION_ENDS = "the session ends"
_WANTED = "another request waits for its devices"

Result = TypeVar("Result")


class Pool:
    """The worlds of one session. In other threads, only :meth:`close` waits long."""

    def __init__(
        self,
        machine: Machine,
        spec: SessionSpec,
        slots: int,
        *,
        record: Recorder,
        show: Callable[[str], None],
        here: Callable[[StarterReports], LocalStarter],
        elsewhere: Elsewhere | None = None,
        jobs: Callable[[LocalStarter, StarterReports], Starter[Any]] | None = None,
    ) -> None:
        """`slots` is the maximum number of ranks that run on the CPU at once; a larger world runs alone.

        `record` gets the events of the pool, and `show` lines for the terminal. `here`, which returns the starter of
        this machine, is called in the pool's thread. `elsewhere` are other machines, and `jobs` is called when a test
        first needs an MPI job.
        """
        self.summary = PoolSummary(spec.directory)
        self.directory = spec.directory
        self.worlds: dict[int, PooledWorld] = {}
        """All worlds that have processes, by number."""
        self.requests: dict[int, WorldRequest] = {}
        """The requests that have not been answered, by id."""
        self.devices: set[tuple[int, str]] = set()
        """The machine and id of each known device."""
        self.broken: str | None = None
        """The error after which no world can be started any more, or None."""
        self._machine = machine
        self._slots = slots
        self._first_worker = spec.first_worker
        self._record = record
        self._show = show
        self._make_jobs = jobs
        self._jobs: Starter[Any] | None = None
        """The starter of MPI jobs; None before the first job."""
        self._closing = False
        self._last_number = 0
        """The last number given to a request or a world."""
        self._recorded_machines = 0
        """The number of machines that have been recorded."""
        self._loop = GuardedLoop()
        self._loop.set_exception_handler(lambda loop, context: self._failed(context))
        self._changed = Event()
        """Set when a world is gone, for the end of the session."""
        self._tasks: list[Task[None]] = []
        """The tasks that do not belong to a request."""
        self._thread = threads.start(self._run, "accel-pool")
        try:
            self.call(self._open, here, elsewhere, spec)
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
        result: Future[Result] = Future()

        def run() -> None:
            try:
                result.set_result(method(*arguments))
            except BaseException as error:
                result.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:  # The pool is closed.
            return method(*arguments)
        return result.result(threads.END_TIMEOUT)

    def _open(
        self, here: Callable[[StarterReports], LocalStarter], elsewhere: Elsewhere | None, spec: SessionSpec
    ) -> None:
        on_cluster = self._machine.is_cluster  # Its devices are known once they are used.
        self._here = here(self)
        self._elsewhere = None if elsewhere is None else elsewhere.starter(spec, self._here, self)
        self._record("PoolOpened", slots=self._slots, kind=self._machine.session_kind)
        if on_cluster or len(self._machines) > 1:
            self._record_machines()
        for device in () if on_cluster else self._machine.session.devices:
            self._record_device(device, 0)
        self._tasks = [loop_tasks.start(self._here.leases.run()), loop_tasks.start(self._tick())]

    def _failed(self, context: dict[str, Any]) -> None:
        """Terminate all worlds, because a callback or task in the pool's loop has raised an unexpected error."""
        error = context.get("exception") or RuntimeError(context.get("message"))
        why = f"the pool has ended with an error:\n{''.join(format_exception(error)).rstrip()}"
        if sys.platform == "linux" and not os.path.exists("/proc/self/stat"):
            why = f"/proc cannot be read: ranks cannot be started without it\n{why}"
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
                for world in self._in_state(WorldState.IN_USE):  # The world may have been granted meanwhile.
                    if world.request is not None and (world.driver, world.request.demand.number) == (driver, number):
                        self.give_back(world.spec.world, "its driver has stopped waiting for it", frozenset())
            case GiveBackWorld(world, kill_reason, noticed, retire, interrupted):
                if interrupted is not None:
                    self.record_interrupted(world, interrupted)  # Slow, but the session is ending.
                self.give_back(world, kill_reason, noticed, retire)
            case WarmServer():
                if not self._closing and self.broken is None:
                    with suppress(OSError):  # The first test that needs a server reports the error.
                        (self._elsewhere or self._here).warm()

    def _acquire(self, driver: PoolDriver, demand: WorldDemand) -> None:
        self._last_number += 1
        request = WorldRequest(self._last_number, demand, driver, WAITING_SHOWN_AFTER)
        if demand.key.ranks:
            self._record("WorldRequested", request=request.id, test=demand.holder.test, about=demand.key.about)
        self.requests[request.id] = request
        request.task = self._loop.create_task(self._provide(request))

    def _cancel(self, request: WorldRequest) -> None:
        """Cancel a request, without an answer."""
        del self.requests[request.id]
        assert request.task is not None
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
                self.summary.add_problem(OutsideError.DIED_BETWEEN_TESTS, world, rank, end)
        world.request = None
        self._note(world, "WorldReturned")
        if world.ended or world.exits or (kill_reason is not None and not retire):
            self._kill(world, kill_reason or "a rank has ended")
        elif world.spec.key.fresh or retire or self._closing:
            fresh = "its test asks for fresh ranks" if world.spec.key.fresh else "no further test can use it"
            self._retire(world, kill_reason or fresh, quietly=kill_reason is not None)
        elif world.keeps and world.wanted:
            self._hand_on(world)
        else:
            world.become(WorldState.IDLE)
        if not world.keeps and (taken := world.drop()) is not None:  # CPU slots are the test's, not the world's.
            world.starter.leases.give_back(taken, killed=False)
        self._retire_idle()

    def record_interrupted(self, number: int | None = None, test: str = "") -> None:
        """Record where the ranks of world `number`, which runs `test`, are; of all worlds in use if it is None."""
        for world in self._in_state(WorldState.IN_USE):
            if number in (None, world.spec.world):
                self.summary.add_interrupted(world, test)

    def driver_lost(self, driver: PoolDriver) -> None:
        """Cancel the requests of a driver whose process has ended, and terminate its worlds."""
        for request in [request for request in self.requests.values() if request.driver == driver]:
            self._cancel(request)
        for world in list(self.worlds.values()):
            if world.request is not None and world.request.driver == driver:
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
        threads.end(self._thread)

    async def _end(self, *, gracefully: bool) -> None:
        self._closing = True
        for request in list(self.requests.values()):
            self._cancel(request)
        for world in list(self.worlds.values()):
            if gracefully and world.state is WorldState.IDLE:
                self._retire(world, _SESSION_ENDS)
            elif not world.ending or not gracefully:
                self._kill(world, _SESSION_ENDS)
        with ExitStack() as rest:  # An error in one step does not keep the others from being done.
            rest.callback(session_folder.remove, self.directory)
            rest.callback(self._here.leases.close)
            for task in self._tasks:
                rest.callback(task.cancel)
            deadline = monotonic() + RETIRE_TIMEOUT + _REPORTING_TIMEOUT
            while self.worlds and (left := deadline - monotonic()) > 0:
                self._changed.clear()
                with suppress(WaitTimeoutError):
                    await wait_for(self._changed.wait(), left)
            for world in list(self.worlds.values()):
                if world.state is WorldState.RETIRING:
                    self.summary.add_problem(OutsideError.NOT_TORN_DOWN, world, 0)
                    self._kill(world, _SESSION_ENDS)
            # The fork server, which kills processes that its ranks have left, may have failed.
            # The server of this machine is stopped last, since it removes the session's folder.
            stopped = [await one.stop() for one in (self._jobs, self._elsewhere, self._here) if one is not None]
            if not all(stopped) or self.broken is not None:
                with suppress(Exception):  # An unreadable /proc, for example, may be the cause of the failure.
                    self._report_left(kill_marked(self.directory))
            for world in list(self.worlds.values()):
                self._forget(world)

    # Called by starters

    def wanted(self, taken: Taken) -> bool:
        """Retire the world that has `taken` if it is idle, or notify the driver that uses the world."""
        world = self._world_with(taken)
        if world is None:
            return False
        if world.state is WorldState.IDLE:
            self._retire(world, _WANTED)
        elif world.state is WorldState.IN_USE and world.request is not None:
            world.request.driver.handle(WorldWanted(world.spec.world))
        return world.ending

    def lost(self, taken: Taken, why: str) -> None:
        """Kill the world whose ranks must not use `taken` any more."""
        world = self._world_with(taken)
        if world is not None and world.state is not WorldState.KILLED:
            if world.state is WorldState.IN_USE:
                # A test that uses the devices in its driver's process goes on, so the session has to fail.
                self.summary.errors.append(why)
            world.forced_exit = RankExit(ExitCause.LOCK_LOST)
            self._kill(world, why)

    def report(self, message: ServerReport) -> None:
        """Handle a report of a fork server."""
        match message:
            case WorldStarted(number, problem=why) if why:
                self._not_started(number, why)
            case WorldStarted(number, pids):
                self._started(number, pids)
            case RankExited(number, rank, end):
                self.exited(number, rank, end)
            case ServerNotice(note, error, survivors):
                self._report_left(survivors)
                if note and note not in self.summary.notes:  # Several fork servers may send the same note.
                    self.summary.notes.append(note)
                if error:
                    self.broken_by(error)

    def _started(self, number: int, pids: tuple[int, ...]) -> None:
        """Wake the request of a world whose processes have started."""
        world = self.worlds.get(number)
        if world is not None and world.state is WorldState.STARTING:
            world.pids = pids
            self._record("WorldReady", world=number, pids=pids)
            if not world.start.done():
                world.start.set_result(None)

    def _not_started(self, number: int, why: str) -> None:
        """Forget a world that could not be started, and fail its request."""
        if (world := self.worlds.get(number)) is not None:
            self._forget(world)
            separator = "\n" if "\n" in why else " "
            loop_tasks.fail(world.start, PlaceError(f"the ranks could not be started:{separator}{why}"))

    def exited(self, number: int, rank: int, end: RankExit) -> None:
        """Record the exit of a rank; add an error to the session's summary if no driver can notice the exit."""
        world = self.worlds.get(number)
        if world is None:
            return
        world.rank_exited(rank, end)
        if world.state is WorldState.RETIRING and end == exited(FAILED_BY_HOOK):
            self.summary.add_problem(OutsideError.FAILED_BY_HOOK, world, rank)
        elif world.state is WorldState.RETIRING and end.status != RETIRED:
            self.summary.add_problem(OutsideError.DIED_IN_TEARDOWN, world, rank, end)
        elif world.state is WorldState.IDLE:
            self.summary.add_problem(OutsideError.DIED_BETWEEN_TESTS, world, rank, end)
            self._kill(world, "a rank has ended")
        if world.ended and world.ending:
            self._forget(world)

    def _report_left(self, processes: Iterable[str]) -> None:
        """Report processes that live on although they were killed."""
        self.summary.errors += [f"{process} could not be killed" for process in processes]

    def lost_ranks(self, starter: Starter[Any], server: int, loss: str | None) -> None:
        """End the worlds whose ranks have ended with the fork server that had started them."""
        log = tail(server_log_path(self.directory, server))
        why, end = f"the fork server ended twice while starting a world\n{log}", RankExit(ExitCause.SERVER_ENDED)
        if loss is not None:
            why, end = f"a machine of this session is lost: {loss}", RankExit(ExitCause.MACHINE_LOST, about=loss)
        worlds = [one for one in self.worlds.values() if one.starter is starter and server in one.spec.server_numbers]
        for world in worlds:
            for rank in range(world.spec.ranks):
                if world.spec.server_of(rank) == server:
                    world.rank_exited(rank, end)  # Before the slow cleanup, since the drivers wait for it.
        self._report_left(kill_marked(self.directory, server))
        for world in worlds:
            if world.state is WorldState.RETIRING and self._closing:
                self.summary.add_problem(OutsideError.NOT_TORN_DOWN, world, 0)
            loop_tasks.fail(world.start, LostPlaceError(why))
            if world.state not in (WorldState.IN_USE, WorldState.GONE):  # Drivers give back worlds in use.
                self._kill(world, why)

    def broken_by(self, why: str) -> None:
        """Terminate all worlds, and start none any more; the first reason stays."""
        if self.broken is not None:
            return
        self.broken = why
        self.summary.errors.append(why)
        # The pool has an error, so each step may fail. The others must be done nevertheless.
        for request in list(self.requests.values()):
            with suppress(Exception):
                self._refuse(request, why)
        for world in list(self.worlds.values()):
            with suppress(Exception):
                self._kill(world, why)

    # The life of a request and of its world

    async def _provide(self, request: WorldRequest) -> None:
        """Answer a request with an idle world, else with a new world or with the reason why there is none."""
        try:
            if self.broken is not None or self._closing:
                raise PlaceError(self.broken or _SESSION_ENDS)
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
        world = self._find_idle(request) if starter.keeps(key) else None
        if world is None:
            taken = await self._take(request, starter)
            with ExitStack() as undo:
                undo.callback(starter.leases.give_back, taken, killed=False)
                world = None if starter.keeps(key) else self._find_idle(request)
                if world is None:
                    world = self._begin(request, starter, taken)
                else:
                    world.taken = taken
                undo.pop_all()
            if world.state is WorldState.STARTING and key.ranks:
                await self._start(world)
        self._hand_over(world, request)

    def _starter(self, key: WorldKey) -> Starter[Any]:
        """Return the starter of worlds of `key`."""
        if key.launcher is not None and self._make_jobs is not None:
            if self._jobs is None:
                self._jobs = self._make_jobs(self._here, self)
            return self._jobs
        return self._elsewhere if self._elsewhere is not None and self._elsewhere.serves(key) else self._here

    @property
    def _machines(self) -> tuple[str, ...]:
        """The names of the machines on which ranks may run, by number; empty for this machine if there is no other."""
        return ("",) if self._elsewhere is None else self._elsewhere.machines

    async def _take(self, request: WorldRequest, starter: Starter[Any]) -> Taken:
        """Wait for the devices or CPU slots of a world, and return them."""
        request.starter = starter
        timeout = request.demand.timeout
        left = None if timeout is None else max(0.0, request.since + timeout - monotonic())
        late = None if left is None else self._loop.call_later(left, self._refuse_late, request)
        self._loop.call_soon(self._record_wait, request)
        try:
            taken: Taken = await starter.leases.take(request.demand)
            return taken
        finally:
            request.starter = None
            if late is not None:
                late.cancel()

    def _record_wait(self, request: WorldRequest) -> None:
        if (why := request.waiting()) is not None:
            self._record("RequestWaits", request=request.id, why=why)

    def _refuse_late(self, request: WorldRequest) -> None:
        found = request.waits_for()
        why = f"no devices came free within {request.demand.timeout:g} s (--accel-wait)"
        self._refuse(request, "\n".join([why, *(found[1] if found is not None else ())]))

    def _begin(self, request: WorldRequest, starter: Starter[Any], taken: Taken) -> PooledWorld:
        """Return a new world for `request`, which has `taken` from then on; its processes are not started yet."""
        key = request.demand.key
        self._last_number += 1
        spec = starter.place(WorldSpec(self._last_number, key, self._machine.argument(key.kind)), taken)
        used = {number for world in self.worlds.values() for number in world.spec.workers}
        workers = tuple(islice((one for one in count(self._first_worker) if one not in used), spec.ranks))
        spec = replace(spec, workers=workers, worker_count=max((*used, *workers), default=0) + 1)
        world = self.worlds[spec.world] = PooledWorld(spec, request, starter, taken)
        self._record_machines()
        places = []
        for rank in range(spec.ranks):
            devices, machine = spec.devices_of(rank), spec.machine_of(rank)
            for device in devices:
                self._record_device(device, machine)
            share = max((fraction(spec.share, device) for device in devices), default=1.0)
            places.append({"machine": machine, "devices": [device.id for device in devices], "share": share})
        self._note(world, "WorldStarting", request=request.id, about=key.about, places=places)
        request.waited = monotonic() - request.since
        return world

    async def _start(self, world: PooledWorld) -> None:
        """Start the processes of a world, and wait until they have started; otherwise kill it and raise an error."""
        assert world.taken is not None
        try:
            world.starter.start(world.spec, world.taken)
        except Exception as error:  # For example no memory for a process.
            self._not_started(world.spec.world, str(error) if isinstance(error, NoThreadError) else format_exc())
        try:
            await shield(world.start)
            if world.state is not WorldState.STARTING:
                raise LostPlaceError("the ranks have ended while they were started")
        except BaseException as error:
            if world.state is WorldState.STARTING:
                self._kill(world, "its request was cancelled" if isinstance(error, CancelledError) else str(error))
            raise

    def _hand_over(self, world: PooledWorld, request: WorldRequest) -> None:
        """Give a world to the driver of a request."""
        warm = world.state is not WorldState.STARTING
        world.become(WorldState.IN_USE)
        world.request, world.driver = request, request.driver
        holder, spec = request.demand.holder, world.spec
        try:
            if world.taken is not None:
                world.starter.leases.describe(world.taken, holder.test, world.pids if spec.ranks else (holder.pid,))
            self._note(world, "WorldAcquired", request=request.id, reused=warm)
            names = self._machines
            hosts = (names[spec.machine_of(rank)] or gethostname() for rank in range(spec.ranks))
            waited = monotonic() - request.since if request.waited is None else request.waited
            grant = WorldGrant(spec, world.pids, self.directory, warm, waited, tuple(dict.fromkeys(hosts)))
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
            self._retire(world, _WANTED)
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
        assert request.task is not None
        request.task.cancel()
        self._answer(request, why)

    def _find_idle(self, request: WorldRequest) -> PooledWorld | None:
        """Return an idle world for `request`, or None."""
        key = request.demand.key
        found = [one for one in self._in_state(WorldState.IDLE) if one.spec.key == key]
        # Prefer a world that the driver has used last: it has the fixtures of the module.
        return next((one for one in found if one.driver is request.driver), found[0] if found else None)

    def _kill(self, world: PooledWorld, why: str) -> None:
        """Kill the processes of a world at once, because of `why`."""
        world.become(WorldState.KILLED)
        loop_tasks.fail(world.start, PlaceError(why))
        self._note(world, "WorldEnding", why=why, killed=True)
        if world.ended:
            self._forget(world)
        else:
            world.starter.kill(world.spec)

    def _retire(self, world: PooledWorld, why: str, *, quietly: bool = False) -> None:
        """Have the ranks end their pytest sessions because of `why`; kill ranks that run after `RETIRE_TIMEOUT`.

        With `quietly`, errors in this are not reported, and the ranks are killed after `_QUIET_TIMEOUT`.
        """
        world.become(WorldState.KILLED if quietly else WorldState.RETIRING)
        self._note(world, "WorldEnding", why=why)
        for rank, pid in enumerate(world.pids):
            with suppress(OSError):
                Connection(call_rank(self.directory, world.spec, rank, pid).detach()).send(Command.RETIRE)
        if world.ended:
            self._forget(world)
        else:
            self._loop.call_later(_QUIET_TIMEOUT if quietly else RETIRE_TIMEOUT, self._kill_late, world)

    def _kill_late(self, world: PooledWorld) -> None:
        """Kill the ranks of a retired world that have not ended in time."""
        if world.state is WorldState.RETIRING:
            stacks = WorldInspector(self.directory, world.spec).ask(MachineInspector.stacks, world.alive)
            for rank in world.alive:
                self.summary.add_problem(OutsideError.NOT_ENDED, world, rank, stack=stacks.get(rank, ""))
        if world.ending:
            self._kill(world, "its ranks have not ended in time")

    def _forget(self, world: PooledWorld) -> None:
        """Remove a world whose processes have ended, and give back its devices or CPU slots."""
        if self.worlds.pop(world.spec.world, None) is None:
            return
        killed = world.state is not WorldState.RETIRING  # Otherwise they were killed by the session, or died in a test.
        world.become(WorldState.GONE)
        self._note(world, "WorldGone")
        WorldInspector(self.directory, world.spec).remove_files()
        world.starter.forget(world.spec)
        if (taken := world.drop()) is not None:
            world.starter.leases.give_back(taken, killed=killed and world.spec.ranks > 0)
        self._changed.set()

    def _retire_idle(self) -> None:
        """Retire the oldest of too many idle ranks.

        A world is kept warm, since the next test of its key then starts within milliseconds. The price is the memory of
        its processes. Its devices are given up once a test of this or another session waits for them.
        """
        idle = sorted(self._in_state(WorldState.IDLE), key=lambda world: world.since)
        # The world that became idle last stays, however many ranks it has: the next test may need the same world.
        while len(idle) > 1 and sum(world.spec.ranks for world in idle) > max(KEPT_RANKS, 2 * self._slots):
            self._retire(idle.pop(0), "more ranks were idle than are kept")

    def _in_state(self, state: WorldState) -> Iterator[PooledWorld]:
        """Yield the worlds that are in `state` when their turn comes: the caller may change states meanwhile."""
        for world in list(self.worlds.values()):
            if world.state is state:
                yield world

    def _world_with(self, taken: Taken) -> PooledWorld | None:
        return next((world for world in self.worlds.values() if world.taken is taken), None)

    async def _tick(self) -> None:
        """Check for silent servers and long waits every `_TICK_INTERVAL` seconds, as long as the session lives."""
        while True:
            await sleep(_TICK_INTERVAL)
            now = monotonic()
            limits = {WorldState.STARTING: START_TIMEOUT, WorldState.KILLED: _ANSWER_TIMEOUT}
            for world in list(self.worlds.values()):
                if now - world.since > limits.get(world.state, math.inf):
                    world.starter.kill_servers(world.spec)
            for request in list(self.requests.values()):
                if now - request.since >= request.show_at and (line := request.waiting()) is not None:
                    request.show_at = now - request.since + WAITING_SHOWN_AGAIN
                    self._show(f"accel: {waiting_text(line, now - request.since)}")

    # Events

    def _note(self, world: PooledWorld, event: str, /, **fields: Any) -> None:
        """Record an event of a world, but not of a lease without ranks."""
        if world.spec.ranks:
            self._record(event, **{"world": world.spec.world, **fields})

    def _record_machines(self) -> None:
        names = self._machines
        for number in range(self._recorded_machines, len(names) if len(names) > 1 else 0):
            self._record("MachineFound", machine=number, name=names[number])
            self._recorded_machines = number + 1

    def _record_device(self, device: Device, machine: int) -> None:
        if (machine, device.id) not in self.devices:
            self.devices.add((machine, device.id))
            facts = {name: getattr(device, name) for name in ("kind", "index", "name", "memory")}
            self._record("DeviceFound", device=device.id, machine=machine, **facts)


def waiting_text(line: str, seconds: float) -> str:
    """Return the text about a test that has waited for `seconds`; `line` is from :meth:`WorldRequest.waiting`."""
    return f"{line} (for {seconds:.0f} s now)"


# The ends of the drivers in the controller


class WorkerDriver:
    """The driver of an xdist worker, whose messages arrive in execnet's receiver thread."""

    def __init__(
        self,
        channel: Channel,
        pool: Callable[[], Pool],
        on_usage_error: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        """`pool` returns the pool, and creates it at the first call, when a worker first needs it.

        `show` writes a line to the terminal.
        """
        self._channel = channel
        self._get_pool = pool
        self._on_usage_error = on_usage_error
        self._show = show
        self._used_pool: Pool | None = None
        """The pool; None if the worker has not needed it, or it could not be created."""

    def handle(self, message: PoolMessage) -> None:
        with suppress(OSError):  # The worker has ended; the end marker follows.
            self._channel.send(encode(message))

    def receive(self, data: bytes | None) -> None:
        """Handle a serialized message of the worker; `data` is None if the worker has ended."""
        message: DriverMessage | None = None
        try:
            if data is not None:
                message = decode(data, DriverMessage)
                if isinstance(message, ShowLine):
                    (self._on_usage_error if message.is_usage_error else self._show)(message.line)
                else:
                    self._used_pool = self._get_pool()
                    self._used_pool.post(self._used_pool.serve, self, message)
            elif self._used_pool is not None:
                self._used_pool.post(self._used_pool.driver_lost, self)
        except BaseException:  # execnet would hide the error: answer the request with it, and fail the pool.
            why = f"a request of an xdist worker has ended with an error:\n{format_exc().rstrip()}"
            if isinstance(message, WorldDemand):
                self.handle(Answer(message.number, why))
            if self._used_pool is not None:
                self._used_pool.post(self._used_pool.broken_by, why)


def client_here(pool: Pool, show: Callable[[str], None]) -> PoolClient:
    """Return the client of a driver in the controller, whose messages are calls of the pool."""

    def send(message: DriverMessage) -> None:
        if isinstance(message, ShowLine):
            if message.is_usage_error:
                raise pytest.UsageError(message.line)
            show(message.line)
            return
        pool.post(pool.serve, client, message)
        if isinstance(message, WarmServer):
            pool.call(int)  # Wait: tests may change what a server that is started later would inherit.

    client = PoolClient(send)
    return client
