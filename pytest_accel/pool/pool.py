"""The pool: the only owner of a session's worlds. It lives in the controller.

Everything here happens in one thread, in an asyncio loop, so no state has a lock: other threads post messages
(:meth:`Pool.post`), or have a function called there and wait for its result (:meth:`Pool.call`). A request for a world
is a task (:meth:`Pool._provide`), so its cancellation undoes exactly what it has done.
"""

from __future__ import annotations

import os
import sys
from asyncio import CancelledError, Event, Task, run_coroutine_threadsafe, shield, sleep, wait_for
from asyncio import TimeoutError as WaitTimeoutError
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from socket import gethostname
from threading import current_thread
from traceback import format_exc
from typing import Any, NamedTuple, Protocol, TypeVar

from pytest_accel.compat.asyncio_shims import GuardedLoop
from pytest_accel.core import loop_tasks, session_folder, threads
from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import Device
from pytest_accel.core.kill import KILL_TIMEOUT, Survivor, kill_marked
from pytest_accel.core.record_events import Recorder
from pytest_accel.core.threads import NoThreadError
from pytest_accel.core.timeouts import START_TIMEOUT
from pytest_accel.core.world_key import WorldKey
from pytest_accel.diagnostics.diagnosis import Examiner, Progress
from pytest_accel.diagnostics.inspector import MachineInspector, WorldInspector
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.messages.connect import call_rank
from pytest_accel.messages.rank_exit import ExitCause, RankExit
from pytest_accel.messages.rank_messages import RETIRED, Retire
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.messages.worker_input import WorkerInput
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.idle_policy import KEPT_RANKS, WANTED, IdleWorld, to_retire
from pytest_accel.pool.pool_events import device_found, world_starting
from pytest_accel.pool.pool_messages import PoolError, WorldGrant
from pytest_accel.pool.pooled_world import (
    QUIET_TIMEOUT,
    RETIRE_TIMEOUT,
    PooledWorld,
    WantedObserver,
    WorldRequest,
    WorldState,
)
from pytest_accel.pool.starter import LostPlaceError, PlaceError, Starter, StarterReports, Taken
from pytest_accel.pool.summary import PoolSummary

_STACKS_BEFORE_KILL = 4.0
"""Seconds between taking the stacks of a retiring world and killing it: ranks have two seconds to write them."""
_REPORTING_TIMEOUT = 10.0
"""Seconds in which the starters, at the end of the session, must report the ranks that they have killed."""
_ANSWER_TICKS = 30
"""Ticks (of a second) after the kill of a world in which its end must be reported.

A fork server that does not report it is stopped (SIGSTOP) or hangs.
"""
_TICK_INTERVAL = 1.0
_SESSION_ENDS = "the session ends"
_NOT_REUSABLE = "no further test can use it"

Result = TypeVar("Result")


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


class RankNumbers(Protocol):
    """The identities of ranks as xdist's workers."""

    def take(self, ranks: int) -> tuple[WorkerInput, ...]:
        """Return those of the ranks of a new world."""

    def give_back(self, inputs: tuple[WorkerInput, ...]) -> None:
        """Let other ranks have them: the processes have ended."""


class Starters(Protocol):
    """The starters of a session."""

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of the machines on which ranks may run, by number; empty for this one if it is the only one."""

    def of(self, key: WorldKey) -> Starter[Any]:
        """Return the starter of worlds of `key`."""

    def warm(self) -> None:
        """Start what the first world will need; never raise."""

    async def stop(self) -> bool:
        """End all processes that starters have started; return False if some may live on."""

    async def run(self) -> None:
        """Do what the leases have to do as long as the session lives."""

    def close(self) -> None:
        """Give up all devices. No process uses any."""


class Pool:
    """The worlds of one session. In other threads, only :meth:`close` waits long."""

    def __init__(
        self,
        machine: Machine,
        spec: SessionSpec,
        slots: int,
        *,
        workers: RankNumbers,
        record: Recorder,
        starters: Callable[[StarterReports], Starters],
        on_cluster: bool = False,
    ) -> None:
        """`slots` is the maximum number of ranks that run on the CPU at once; a larger world runs alone.

        `workers` numbers the ranks. `record` gets the events of the pool. `starters` is called in the pool's thread.
        The devices of a cluster are known once they are used (`on_cluster`).
        """
        self.summary = PoolSummary(spec.directory)
        self.directory = spec.directory
        self.worlds: dict[int, PooledWorld] = {}
        """All worlds that have processes, by number."""
        self.broken: str | None = None
        """The error after which no world can be started any more; None if there was none."""
        self._machine = machine
        self._slots = slots
        self._workers = workers
        self._record = record
        self._closing = False
        self._requests: dict[int, WorldRequest] = {}
        """The requests that have not been answered, by id."""
        self._lent: dict[int, tuple[WantedObserver, Starter[Any], Taken]] = {}
        """The leases without a world, with their drivers, by the number of the request."""
        self._last_number = 0
        """The last number given to a request or a world."""
        self._recorded_devices: set[tuple[int, str]] = set()
        """The machine and id of each device that has an event."""
        self._recorded_machines = 0
        """The number of machines that have an event."""
        self._loop = GuardedLoop()
        self._loop.set_exception_handler(lambda loop, context: self._failed(context))
        self._changed = Event()
        """Set when a world is gone, for the end of the session."""
        self._tasks: list[Task[None]] = []
        """The tasks that do not belong to a request."""
        self._left: dict[int, tuple[tuple[Survivor, ...], tuple[Device, ...]]] = {}
        """The processes that live on although they were killed, with their devices, by the number of the world."""
        self._thread = threads.start(self._run, "accel-pool")
        try:
            self.call(self._open, starters, on_cluster)
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

    def _open(self, starters: Callable[[StarterReports], Starters], on_cluster: bool) -> None:
        self._starters = starters(self)
        self._record("PoolOpened", slots=self._slots, kind=self._machine.session_kind)
        if on_cluster or len(self._starters.machines) > 1:
            self._record_machines()
        if not on_cluster:
            for device in self._machine.session.devices:
                self._record_device(device, 0)
        self._tasks = [loop_tasks.start(self._starters.run()), loop_tasks.start(self._tick())]

    def _failed(self, context: dict[str, Any]) -> None:
        """Terminate all worlds because the pool has an error. The one place where a bug of it ends."""
        error = context.get("exception")
        try:
            raise error if error is not None else RuntimeError(context.get("message"))
        except BaseException:
            self.fail(f"the pool has ended with an error:\n{format_exc()}")

    def fail(self, why: str) -> None:
        """Terminate all worlds because of an error; `why` has its traceback. Requests get an error from then on."""
        if current_thread() is not self._thread:
            self.post(self.fail, why)
            return
        no_proc = sys.platform == "linux" and not os.path.exists("/proc/self/stat")
        hint = "/proc cannot be read: ranks cannot be started without it" if no_proc else ""
        self.broken_by("\n".join(filter(None, (hint, why.rstrip()))))

    # Called by drivers

    def warm(self) -> None:
        """Start the fork server, so that it imports torch while tests are collected."""
        if not self._closing and self.broken is None:
            self._starters.warm()

    def acquire(
        self, demand: WorldDemand, driver: WantedObserver, answer: Callable[[WorldGrant | PoolError], None]
    ) -> int:
        """Request a world; return the id of the request. `answer` is called later, in the pool's thread."""
        self._last_number += 1
        request = WorldRequest(self._last_number, demand, driver, answer)
        if demand.key.ranks:
            self._record("WorldRequested", request=request.id, test=demand.holder.test, about=demand.key.about)
        self._requests[request.id] = request
        request.task = self._loop.create_task(self._provide(request))
        return request.id

    def cancel(self, request_id: int) -> None:
        """Cancel a request, without an answer."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            assert request.task is not None
            request.task.cancel()
            self._record("RequestEnded", request=request_id, why="cancelled")

    def fail_if_waiting(self, request_id: int, why: str) -> None:
        """Cancel a request that waits for leases, and answer it with an error that says `why`; no-op if it has them."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.starter is None:  # It does not wait yet, or will do so again if a machine is lost.
            request.late = why
            return
        waiting = request.starter.waiting(request.demand)
        assert request.task is not None
        request.task.cancel()
        self._answer(request, PoolError("\n".join([why, *(waiting.obstacles if waiting is not None else ())])))

    def waiting(self, request_id: int) -> str | None:
        """Return a line with the test, what it waits for and who holds that; None if the request waits for no lease."""
        request = self._requests.get(request_id)
        found = None if request is None or request.starter is None else request.starter.waiting(request.demand)
        if request is None or found is None:
            return None
        waits = f"{request.demand.holder.test} waits for {found.what}"
        return ": ".join(filter(None, (waits, "; ".join(found.obstacles))))

    def snapshot(self) -> PoolSnapshot:
        """Return the present state of requests, worlds and devices."""
        waiting = [
            (one.id, one.demand.holder.test, one.since) for one in self._requests.values() if one.demand.key.ranks
        ]
        worlds = [one for one in self.worlds.values() if one.state in (WorldState.STARTING, WorldState.IN_USE)]
        used = {
            (world.spec.machine_of(rank), device.id)
            for world in worlds
            for rank in range(world.spec.ranks)
            for device in world.spec.devices_of(rank)
        }
        drivers = [(one.spec.world, one.request.demand.holder.test) for one in worlds if one.request is not None]
        return PoolSnapshot(waiting, drivers, len(used), len(self._recorded_devices))

    def ranks_in_use(self, number: int) -> tuple[WorldSpec, dict[int, int]] | None:
        """Return the description of a world that a driver has, and its living ranks; None if no driver has it."""
        world = self.worlds.get(number)
        return None if world is None or world.state is not WorldState.IN_USE else (world.spec, world.alive)

    def cancel_waiting(self) -> list[str]:
        """Cancel all requests that wait for a lease; return the line of :meth:`waiting` for each."""
        lines = []
        for number in list(self._requests):
            if (line := self.waiting(number)) is not None:
                lines.append(line)
                self.cancel(number)
        return lines

    def release(self, number: int, kill_reason: str | None, noticed: frozenset[int], retire: bool = False) -> None:
        """Return a world, or a lease without one, that a driver has used; no-op if it does not have it any more.

        `kill_reason` says why the world must be killed. With `retire`, the world must not run another test, but its
        ranks can end their sessions. With both, how they do that is not reported.

        `noticed` are the ranks whose death the driver has reported in a test. The death of any other rank is an error
        in the session's summary: a test killed the rank and passed.
        """
        if number in self._lent:
            _, starter, taken = self._lent.pop(number)
            starter.give_back(taken, killed=False)
            return
        world = self.worlds.get(number)
        if world is None or world.state is not WorldState.IN_USE:
            return
        for rank, end in world.exits.items():
            if rank not in noticed:
                self.summary.add_death(world, rank, end)
        world.take_back()
        self._record("WorldReturned", world=number)
        if world.exits or (kill_reason is not None and not retire):
            self._kill(world, kill_reason or "a rank has ended")
        elif world.spec.key.fresh or retire or self._closing:
            why = kill_reason or ("its test asks for fresh ranks" if world.spec.key.fresh else _NOT_REUSABLE)
            self._retire(world, why, quietly=kill_reason is not None)
        elif world.keeps and world.wanted:
            self._pass_on(world)
        else:
            world.make_idle()
        self._release_slots(world)
        self._retire_idle()

    def record_interrupted(self, number: int | None = None, test: str = "") -> None:
        """Record where the ranks of world `number`, which runs `test`, are; of all worlds that run a test if None."""
        for world in self._in_state(WorldState.IN_USE):
            if number in (None, world.spec.world):
                self.summary.add_interrupted(world, test)

    def watch_exit(self, number: int, rank: int, on_exit: Callable[[RankExit | None], None]) -> None:
        """Call `on_exit` with the rank's exit status once it has ended; with None if the status is unknown."""
        world = self.worlds.get(number)
        if world is None:
            on_exit(None)
        else:
            world.watch_exit(rank, on_exit)

    def driver_lost(self, driver: WantedObserver) -> None:
        """Cancel the requests of a driver whose process has ended, and terminate its worlds."""
        for request in [request for request in self._requests.values() if request.driver == driver]:
            self.cancel(request.id)
        for number, (owner, _, _) in list(self._lent.items()):
            if owner == driver:
                self.release(number, None, frozenset())
        for world in list(self.worlds.values()):
            if world.request is not None and world.request.driver == driver:
                self.release(world.spec.world, "its driver ended", frozenset(world.exits))

    # In the caller's thread

    def progress(self, number: int) -> Progress:
        """Return what the living ranks of a world are doing. This does not disturb them, and may take a second."""
        found = self.call(self.ranks_in_use, number)
        if found is None:
            return Progress()
        spec, alive = found
        return Examiner(self.directory, spec).progress(alive)

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
        for request in list(self._requests.values()):
            self.cancel(request.id)
        for world in list(self.worlds.values()):
            if gracefully and world.state is WorldState.IDLE:
                self._retire(world, _SESSION_ENDS)
            elif world.state not in (WorldState.RETIRING, WorldState.KILLED) or not gracefully:
                self._kill(world, _SESSION_ENDS)
        with ExitStack() as rest:  # An error in one step does not keep the others from being done.
            rest.callback(session_folder.remove, self.directory)
            rest.callback(self._starters.close)
            for task in self._tasks:
                rest.callback(task.cancel)
            await self._await_ends(lambda: not self.worlds, RETIRE_TIMEOUT + _REPORTING_TIMEOUT)
            for world in list(self.worlds.values()):
                if world.state is WorldState.RETIRING:
                    self.summary.add_unknown_teardown(world)
                    self._kill(world, _SESSION_ENDS)
            # A process that was just killed may take a while to free its memory.
            await self._await_ends(lambda: not self._left, KILL_TIMEOUT)
            for processes, devices in self._left.values():
                self.summary.add_left(processes, devices)
            stopped = await self._starters.stop()
            if (
                self.broken is not None or not stopped
            ):  # The fork server, which kills what its ranks have left, may have failed.
                with suppress(Exception):  # An unreadable /proc, for example, may be the cause of the failure.
                    self.summary.add_left(kill_marked(self.directory))
            for world in list(self.worlds.values()):
                self._forget(world)

    async def _await_ends(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = monotonic() + seconds
        while not done() and (left := deadline - monotonic()) > 0:
            self._changed.clear()
            with suppress(WaitTimeoutError):
                await wait_for(self._changed.wait(), left)

    # Called by starters

    def wanted(self, taken: Taken) -> bool:
        """Retire the world that has what is wanted if it is idle, or notify the driver that uses it."""
        world = self._world_with(taken)
        if world is None:
            return False
        if world.state is WorldState.IDLE:
            self._retire(world, WANTED)
        elif world.state is WorldState.IN_USE and world.request is not None:
            world.request.driver.on_wanted(world.spec.world)
        return world.ending

    def lost(self, taken: Taken, why: str) -> None:
        """Kill the world whose ranks may not use what was taken for it any more.

        A test that has it in its driver goes on: the session reports the loss, and fails.
        """
        world = self._world_with(taken)
        if world is None:
            if any(lent is taken for _, _, lent in self._lent.values()):
                self.summary.errors.append(why)
        elif world.state is WorldState.IN_USE:
            # The driver returns the world once it has noticed that the ranks are dead.
            world.revoke(RankExit(ExitCause.LOCK_LOST))
            self.summary.errors.append(why)
            self._record("WorldEnding", world=world.spec.world, why=why, killed=True)
            world.starter.kill(world.spec, 0.0)
        elif world.state is not WorldState.KILLED:
            self._kill(world, why)
            loop_tasks.fail(world.start, PoolError(why))

    def started(self, number: int, pids: tuple[int, ...]) -> None:
        """Let the request of a world have it."""
        world = self.worlds.get(number)
        if world is not None and world.state is WorldState.STARTING:
            world.pids = pids
            assert world.taken is not None
            world.starter.describe(world.taken, pids=pids)
            self._record("WorldReady", world=number, pids=pids)
            if not world.start.done():
                world.start.set_result(None)

    def not_started(self, number: int, why: str) -> None:
        """Answer the request of a world that could not be started."""
        world = self.worlds.get(number)
        if world is not None:
            self._forget(world)
            separator = "\n" if "\n" in why else " "
            loop_tasks.fail(world.start, PoolError(f"the ranks could not be started:{separator}{why}"))

    def exited(self, number: int, rank: int, end: RankExit) -> None:
        """Record the end of a rank. It is an error in the session's summary if no driver can notice it."""
        world = self.worlds.get(number)
        if world is None:
            return
        world.rank_exited(rank, end)
        if world.state is WorldState.RETIRING and end.status != RETIRED:
            self.summary.add_failed_teardown(world, rank, end)
        elif world.state is WorldState.IDLE:
            self.summary.add_death(world, rank, end)
            self._kill(world, "a rank has ended")
        if world.ended and world.ending:
            self._forget(world)

    def left(self, number: int, processes: tuple[Survivor, ...]) -> None:
        """Record which processes of a world live on although they were killed."""
        devices = self._left.pop(number, ((), ()))[1]
        if (world := self.worlds.get(number)) is not None:
            devices = world.spec.devices
        if processes:
            self._left[number] = processes, devices
        self._changed.set()

    def lost_ranks(
        self, starter: Starter[Any], server: int, end: RankExit, why: str, cleanup: Callable[[], Iterable[Survivor]]
    ) -> None:
        """End the worlds of ranks that have ended with the process that had started them.

        The drivers return the worlds in use. Those that were being started may be started once more.
        """
        worlds = [one for one in self.worlds.values() if one.starter is starter and server in one.spec.server_numbers]
        for world in worlds:
            for rank in range(world.spec.ranks):
                if world.spec.server_of(rank) == server:
                    world.rank_exited(rank, end)  # Before the slow cleanup, since the drivers wait for it.
        self.summary.add_left(cleanup())
        for world in worlds:
            if world.state is WorldState.STARTING:
                loop_tasks.fail(world.start, LostPlaceError(why))
            if world.state is WorldState.RETIRING and self._closing:
                self.summary.add_unknown_teardown(world)
            if world.state not in (WorldState.IN_USE, WorldState.GONE):
                self._kill(world, why)

    def note(self, text: str) -> None:
        """Show `text` with ``-v``."""
        self.summary.add_note(text)

    def broken_by(self, why: str) -> None:
        """Terminate all worlds, and start none any more; the first reason stays."""
        if self.broken is not None:
            return
        self.broken = why
        self.summary.errors.append(why)
        for request in list(self._requests.values()):
            with suppress(Exception):
                if request.task is not None:
                    request.task.cancel()
                self._answer(request, PoolError(why))
        for world in list(self.worlds.values()):
            with suppress(Exception):
                self._kill(world, why)

    # The life of a request and of its world

    async def _provide(self, request: WorldRequest) -> None:
        """Answer a request: with an idle world, else with one that is started with what is taken for it."""
        try:
            if self.broken is not None or self._closing:
                raise PoolError(self.broken or _SESSION_ENDS)
            try:
                await self._serve(request)
            except LostPlaceError:
                await self._serve(request)
        except Exception as error:
            expected = isinstance(error, (PoolError, PlaceError))
            self._answer(request, PoolError(str(error) if expected else format_exc()))

    async def _serve(self, request: WorldRequest) -> None:
        demand, key = request.demand, request.demand.key
        starter = self._starters.of(key)
        if starter.keeps(key) and (world := self._find_idle(request)) is not None:
            assert world.taken is not None
            starter.describe(world.taken, test=demand.holder.test)
            self._hand_over(world, request)
            return
        if (why := starter.unavailable(demand)) is not None:
            raise PoolError(why)
        taken = await self._take(request, starter)
        owned = True
        """True as long as nothing else gives `taken` back."""
        try:
            if not key.ranks:
                self._lend(request, starter, taken)
                owned = False
                return
            world = self._world_with(taken) if starter.keeps(key) else self._find_idle(request)
            if world is None:
                world = self._begin(request, starter, taken)
                owned = False
                await self._start(world)
            else:
                owned = False
                if not starter.keeps(key):
                    world.take_slots(taken)
        finally:
            if owned:
                starter.give_back(taken, killed=False)
        self._hand_over(world, request)

    async def _take(self, request: WorldRequest, starter: Starter[Any]) -> Taken:
        """Wait for what a world needs."""
        request.starter = starter
        self._loop.call_soon(self._record_wait, request)
        try:
            taken: Taken = await starter.take(request.demand)
            return taken
        finally:
            request.starter = None

    def _record_wait(self, request: WorldRequest) -> None:
        if (why := self.waiting(request.id)) is not None:
            self._record("RequestWaits", request=request.id, why=why)
        if request.starter is not None and request.late is not None:
            self.fail_if_waiting(request.id, request.late)

    def _lend(self, request: WorldRequest, starter: Starter[Any], taken: Taken) -> None:
        """Give what was taken to the driver of `request`, whose test uses it in the driver's own process."""
        spec = starter.place(WorldSpec(request.id, request.demand.key), taken)
        starter.describe(taken, pids=[request.demand.holder.pid])
        self._lent[request.id] = request.driver, starter, taken
        self._answer(request, WorldGrant(spec, (), self.directory, False, request.end_wait(), ()))

    def _begin(self, request: WorldRequest, starter: Starter[Any], taken: Taken) -> PooledWorld:
        """Return the world for `request`, whose processes are to be started. It has `taken` from then on."""
        key = request.demand.key
        self._last_number += 1
        spec = starter.place(WorldSpec(self._last_number, key, self._machine.argument(key.kind)), taken)
        spec = replace(spec, workers=self._workers.take(spec.ranks))
        world = self.worlds[spec.world] = PooledWorld(spec, request, starter, taken)
        self._record_machines()
        for rank in range(spec.ranks):
            for device in spec.devices_of(rank):
                self._record_device(device, spec.machine_of(rank))
        self._record("WorldStarting", **world_starting(spec, request.id))
        request.end_wait()
        return world

    async def _start(self, world: PooledWorld) -> None:
        """Start the processes of a world, and wait until they have started; otherwise kill it and raise an error."""
        assert world.taken is not None
        try:
            world.starter.start(world.spec, world.taken)
        except Exception as error:  # For example no memory for a process.
            self.not_started(world.spec.world, str(error) if isinstance(error, NoThreadError) else format_exc())
        try:
            await shield(world.start)
            if world.state is not WorldState.STARTING:
                raise LostPlaceError("the ranks have ended while they were started")
        except BaseException as error:
            if world.state is WorldState.STARTING:
                self._kill(world, "its request was cancelled" if isinstance(error, CancelledError) else str(error))
            raise

    def _hand_over(self, world: PooledWorld, request: WorldRequest) -> None:
        warm = world.state is not WorldState.STARTING
        world.hand_over(request)
        try:
            self._record("WorldAcquired", world=world.spec.world, request=request.id, reused=warm)
            names = self._starters.machines
            hosts = (names[world.spec.machine_of(rank)] or gethostname() for rank in range(world.spec.ranks))
            waited, places = request.end_wait(), tuple(dict.fromkeys(hosts))
            self._answer(request, WorldGrant(world.spec, world.pids, self.directory, warm, waited, places))
        except Exception:  # The driver does not know that it has the world.
            self.release(world.spec.world, "it could not be handed to its driver", frozenset())
            raise
        if world.wanted:  # The starter has said so once, before this driver had the world.
            request.driver.on_wanted(world.spec.world)

    def _answer(self, request: WorldRequest, answer: WorldGrant | PoolError) -> None:
        if self._requests.pop(request.id, None) is None:
            return  # It was cancelled, or answered when it failed.
        if isinstance(answer, PoolError):
            self._record("RequestEnded", request=request.id, why=str(answer))
        request.answer(answer)

    def _pass_on(self, world: PooledWorld) -> None:
        """Have the next request for the devices of a returned world get the world, if it fits; otherwise retire it."""
        assert world.taken is not None

        def unclaimed() -> None:
            if world.state is WorldState.IN_USE and world.request is None:
                self._retire(world, WANTED)

        if not world.starter.pass_on(world.taken, unclaimed):
            self._retire(world, WANTED)

    def _find_idle(self, request: WorldRequest) -> PooledWorld | None:
        """Return an idle world for `request` whose ranks are all alive, or None.

        The world that its driver has used last is the first choice: it has the fixtures of the module.
        """
        key = request.demand.key
        found = [one for one in self._in_state(WorldState.IDLE) if one.spec.key == key and not one.exits]
        return next((one for one in found if one.driver is request.driver), found[0] if found else None)

    def _release_slots(self, world: PooledWorld) -> None:
        if not world.keeps and (taken := world.drop()) is not None:
            world.starter.give_back(taken, killed=False)

    def _kill(self, world: PooledWorld, why: str) -> None:
        """Kill the processes of a world at once, because of `why`."""
        world.kill()
        self._record("WorldEnding", world=world.spec.world, why=why, killed=True)
        self._kill_after(world, 0.0)

    def _retire(self, world: PooledWorld, why: str, *, quietly: bool = False) -> None:
        """Have the ranks end their pytest sessions because of `why`; kill those that run after `RETIRE_TIMEOUT`.

        With `quietly`, errors in this are not reported, and the ranks are killed after `QUIET_TIMEOUT`.
        """
        world.retire(quietly=quietly)
        self._record("WorldEnding", world=world.spec.world, why=why)
        for rank, pid in enumerate(world.pids):
            with suppress(OSError):
                Connection(call_rank(self.directory, world.spec, rank, pid).detach()).send(Retire())
        self._kill_after(world, QUIET_TIMEOUT if quietly else RETIRE_TIMEOUT)

    def _kill_after(self, world: PooledWorld, seconds: float) -> None:
        if world.ended:
            self._forget(world)
        else:
            world.starter.kill(world.spec, seconds)

    def _forget(self, world: PooledWorld) -> None:
        """Remove a world whose processes have ended, and return what was taken for it."""
        if self.worlds.pop(world.spec.world, None) is None:
            return
        killed = world.state is not WorldState.RETIRING  # Otherwise they were killed by the session, or died in a test.
        world.gone()
        self._record("WorldGone", world=world.spec.world)
        WorldInspector(self.directory, world.spec).remove_files()
        self._workers.give_back(world.spec.workers)
        world.starter.forget(world.spec)
        if (taken := world.drop()) is not None:
            world.starter.give_back(taken, killed=killed)
        self._changed.set()

    def _retire_idle(self) -> None:
        """Retire the idle worlds that the policy does not keep."""
        idle = [
            IdleWorld(
                world.spec.world,
                sum(not world.spec.is_remote(rank) for rank in range(world.spec.ranks)),
                world.since,
                devices=world.keeps,
            )
            for world in self._in_state(WorldState.IDLE)
        ]
        for number, why in to_retire(idle, monotonic(), max(KEPT_RANKS, 2 * self._slots)):
            self._retire(self.worlds[number], why)

    def _in_state(self, state: WorldState) -> Iterator[PooledWorld]:
        """Yield the worlds that are in `state` when their turn comes: the caller may change states meanwhile."""
        for world in list(self.worlds.values()):
            if world.state is state:
                yield world

    def _world_with(self, taken: Taken) -> PooledWorld | None:
        return next((world for world in self.worlds.values() if world.taken is taken), None)

    async def _tick(self) -> None:
        """Look after worlds that take long, as long as the session lives."""
        while True:
            await sleep(_TICK_INTERVAL)
            now = monotonic()
            for world in list(self.worlds.values()):
                world.tick()
                late = world.state is WorldState.STARTING and now - world.since > START_TIMEOUT
                if late or world.ticks_after_kill == _ANSWER_TICKS:
                    world.starter.kill_silent(
                        world.spec, [one for one in range(world.spec.ranks) if one not in world.exits]
                    )
                deadline = world.retire_deadline if world.state is WorldState.RETIRING else None
                if deadline is not None and 0 < deadline - now < _STACKS_BEFORE_KILL:
                    self._take_stacks(world)
            for request in list(self._requests.values()):
                starter = request.starter
                if starter is not None and (why := starter.unavailable(request.demand)) is not None:
                    assert request.task is not None
                    request.task.cancel()
                    self._answer(request, PoolError(why))
            self._retire_idle()

    def _take_stacks(self, world: PooledWorld) -> None:
        """Record the stacks of the ranks that still run, unless they are known."""
        unknown = {rank: pid for rank, pid in world.alive.items() if not world.stacks.get(rank)}
        if unknown:
            inspector = WorldInspector(self.directory, world.spec)
            world.record_stacks(inspector.ask(MachineInspector.stacks, unknown))

    def _record_machines(self) -> None:
        names = self._starters.machines
        for number in range(self._recorded_machines, len(names) if len(names) > 1 else 0):
            self._record("MachineFound", machine=number, name=names[number])
            self._recorded_machines = number + 1

    def _record_device(self, device: Device, machine: int) -> None:
        if (machine, device.id) not in self._recorded_devices:
            self._recorded_devices.add((machine, device.id))
            self._record("DeviceFound", **device_found(device, machine))
