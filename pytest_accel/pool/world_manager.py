"""The processes of a session's worlds: started, retired and killed through the starters that this module owns."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Condition, RLock
from traceback import format_exc
from typing import Protocol

from pytest_accel.core import session_folder
from pytest_accel.core.clock import monotonic
from pytest_accel.core.kill import KILL_TIMEOUT, kill_marked
from pytest_accel.core.paths import server_log_path
from pytest_accel.core.record_events import Recorder
from pytest_accel.core.threads import NoThreadError
from pytest_accel.core.timeouts import START_TIMEOUT
from pytest_accel.core.truncation import tail
from pytest_accel.diagnostics.inspector import MachineInspector, WorldInspector
from pytest_accel.forkserver.server_client import ForkServerGroup, ServerCallbacks, Spawn
from pytest_accel.forkserver.server_messages import (
    KillWorld,
    PreloadFailed,
    RankExited,
    ServerNote,
    StartFailed,
    StartWorld,
    Survivors,
    WorldStarted,
)
from pytest_accel.messages.connect import call_rank
from pytest_accel.messages.rank_exit import ExitCause, RankExit
from pytest_accel.messages.rank_messages import RETIRED, Retire
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.pooled_world import QUIET_TIMEOUT, RETIRE_TIMEOUT, PooledWorld, WorldRequest, WorldState
from pytest_accel.pool.summary import PoolSummary

_STACKS_BEFORE_KILL = 4.0
"""Seconds between taking the stacks of a retiring world and killing it.

The tick that takes the stacks may be a second late, and ranks of this machine have two seconds to write them; a rank
that has not written its stack is asked again at the next tick. Ranks of another machine may be killed first if that
machine answers slowly; their stacks are then unknown.
"""
_REPORTING_TIMEOUT = 10.0
"""Seconds in which the fork servers, at the end of the session, must report the ranks that they have killed."""
_ANSWER_TICKS = 30
"""Ticks (of a second) after the kill of a world in which its fork servers must report its end.

A server that does not is stopped (SIGSTOP) or hangs.
"""
_FIRST_JOB_SERVER = 1_000_000
"""The number of the first fork server of an MPI job: larger than those of the machines, which may become more."""
_SESSION_ENDS = "the session ends"


class WorldStarter(Protocol):
    """A starter of the processes of worlds: the fork servers, or an MPI job. It reports to :class:`ServerCallbacks`."""

    def send(self, message: object) -> None:
        """Send a message of :mod:`pytest_accel.forkserver.server_messages`. Never raise: `on_end` reports an exit."""

    def kill(self) -> None:
        """Kill its processes. Their exits are reported."""

    def stop(self) -> bool:
        """Stop its processes, and wait for their exit; return False if some may live on.

        The caller must not hold the lock.
        """


StartJob = Callable[[SessionSpec, ServerCallbacks, RLock, str, WorldSpec, Callable[[], None]], WorldStarter]
"""Starts the world of a spec with a launcher, such as ``mpirun``, whose name comes before it. The last argument is
called once all of its processes have exited; those of the callbacks that are about fork servers are not called."""


def no_jobs(*arguments: object) -> WorldStarter:
    """Raise an error: nothing in this session starts worlds with a launcher. A :data:`StartJob`."""
    raise RuntimeError("no part of this session starts ranks with a launcher")


class WorldObserver(Protocol):
    """The callbacks of a :class:`WorldManager`. Each is called with the lock held."""

    def on_started(self, world: PooledWorld) -> None:
        """Handle a world whose processes have started."""

    def on_not_started(self, world: PooledWorld, why: str) -> None:
        """Handle a world that could not be started; the manager has forgotten it."""

    def on_lost(self, world: PooledWorld, why: str) -> None:
        """Handle a world that was lost while it was being started, because a fork server ended or a machine was lost.

        `why` says which. The manager kills the world's remaining processes.
        """

    def on_gone(self, world: PooledWorld, *, killed: bool) -> None:
        """Handle a world whose processes have all ended, so that its devices are free; `killed` if they were killed."""

    def on_survivors(self, world: PooledWorld) -> None:
        """Handle processes of a world that live on although they were killed (`PooledWorld.survivors`)."""

    def on_failure(self, why: str) -> None:
        """Handle an error after which no world can be started in this session."""

    def on_tick(self) -> None:
        """Do periodic work; called about once a second."""


class WorldManager:
    """All worlds that have processes, and the starters of these processes. Owned by the pool.

    Callers hold `lock`, except for :meth:`stop_starters`, and :meth:`fail`, which takes it.
    """

    def __init__(
        self,
        spec: SessionSpec,
        lock: RLock,
        observer: WorldObserver,
        summary: PoolSummary,
        spawns: Callable[[], Mapping[int, Spawn]],
        record: Recorder,
        start_job: StartJob,
    ) -> None:
        """`spawns` returns the functions that start the present fork servers, by number.

        `record` gets the events of the worlds. `start_job` starts those that a launcher starts.
        """
        self.worlds: dict[int, PooledWorld] = {}
        self.closing = False
        self.broken: str | None = None
        """The error after which no world can be started any more; None if there was none."""
        self.directory = spec.directory
        self._spec = spec
        self._lock = lock
        self._changed = Condition(lock)
        self._observer = observer
        self._summary = summary
        self._spawns = spawns
        self._record = record
        self._starter_of_jobs = start_job
        callbacks = ServerCallbacks(self._handle_message, self._server_ended, self._tick, self.fail)
        self._servers = ForkServerGroup(callbacks, lock)
        """The fork servers: the starter of all worlds that have none of their own."""
        self._own_starters: dict[int, WorldStarter] = {}
        """The starters that serve one world each, by its number."""
        self._next_server = _FIRST_JOB_SERVER
        """The number of the next fork server of an MPI job."""

    def warm(self) -> None:
        """Start all present fork servers that do not run, if that is possible; else the first world has the error."""
        if not self.closing:
            with suppress(OSError, NoThreadError):
                self._servers.run(self._spec, self._spawns())

    def add(self, world: PooledWorld) -> None:
        """Add a world, whose processes are to be started later."""
        self.worlds[world.spec.world] = world

    def start(self, world: PooledWorld) -> None:
        """Start the processes of a world that has been added; the observer gets the result."""
        try:
            if world.spec.key.launcher is not None:
                self._own_starters[world.spec.world] = self._start_job(world, world.spec.key.launcher)
            else:
                spawns = self._spawns()
                needed = {number: spawns[number] for number in world.spec.server_numbers}
                self._servers.run(self._spec, needed)
                self._servers.send(StartWorld(world.spec))
        except Exception as error:  # For example no memory for a process. Without an answer, the driver would wait.
            with suppress(Exception):  # One of several servers may have got the message.
                self._servers.send(KillWorld(world.spec.world))
            why = str(error) if isinstance(error, NoThreadError) else format_exc()
            self._start_failed(StartFailed(world.spec.world, why))

    def _start_job(self, world: PooledWorld, launcher: str) -> WorldStarter:
        first = self._next_server
        self._next_server += world.spec.ranks
        spec = replace(world.spec, servers=tuple(range(first, self._next_server)))
        callbacks = ServerCallbacks(self._handle_message, _ignore_end, self._tick, self.fail)
        on_end = partial(self._own_starter_ended, world, first)
        return self._starter_of_jobs(self._spec, callbacks, self._lock, launcher, spec, on_end)

    def find_idle(self, request: WorldRequest) -> PooledWorld | None:
        """Return an idle world for `request` whose ranks are all alive, or None.

        The world that its driver has used last is the first choice: it has the fixtures of the module.
        """
        key = request.demand.key
        found = [
            one
            for one in self.worlds.values()
            if one.state is WorldState.IDLE and one.spec.key == key and not one.exits
        ]
        return next((one for one in found if one.driver is request.driver), found[0] if found else None)

    def kill(self, world: PooledWorld, why: str) -> None:
        """Kill the processes of a world at once, because of `why`."""
        world.kill()
        self._record("WorldEnding", world=world.spec.world, why=why, killed=True)
        self._kill_after(world, 0.0)

    def revoke(self, world: PooledWorld, why: str) -> None:
        """Kill the processes of a world at once, since it has lost the right to use its devices."""
        if world.state is WorldState.IN_USE:
            # The driver returns the world once it has noticed that the ranks are dead.
            world.revoke(RankExit(ExitCause.LOCK_LOST))
            self._summary.errors.append(why)
            self._record("WorldEnding", world=world.spec.world, why=why, killed=True)
            self._kill_after(world, 0.0)
        elif world.state is WorldState.STARTING:
            self.kill(world, why)
            self._observer.on_not_started(world, why)
        elif world.state in (WorldState.IDLE, WorldState.RETIRING):
            self.kill(world, why)

    def fail(self, why: str) -> None:
        """Terminate all worlds because a thread that they need has ended; `why` has its traceback.

        Takes the lock itself. Waiting and later requests get an error.
        """
        with self._lock:
            if self.broken is not None:
                return
            no_proc = sys.platform == "linux" and not os.path.exists("/proc/self/stat")
            hint = "/proc cannot be read: ranks cannot be started without it" if no_proc else ""
            self._break("\n".join(filter(None, (hint, why.rstrip(), self.server_log(self._spawns())))))

    def _break(self, why: str) -> None:
        """Terminate all worlds, and start none any more, because of `why`; the first reason stays."""
        if self.broken is not None:
            return
        self.broken = why
        self._summary.errors.append(why)
        for starter in (self._servers, *self._own_starters.values()):
            with suppress(Exception):
                starter.kill()
        self._observer.on_failure(why)
        for world in list(self.worlds.values()):
            with suppress(Exception):
                self._forget(world)
        self._changed.notify_all()

    def retire(self, world: PooledWorld, why: str, *, quietly: bool = False) -> None:
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
        """Have the world's processes killed in some seconds, in which they may exit by themselves."""
        if world.ended:
            self._forget(world)
        else:
            starter = self._own_starters.get(world.spec.world, self._servers)
            starter.send(KillWorld(world.spec.world, seconds))

    def _forget(self, world: PooledWorld) -> None:
        """Remove a world whose processes have ended, and tell the observer."""
        if self.worlds.pop(world.spec.world, None) is None:
            return
        if (starter := self._own_starters.get(world.spec.world)) is not None:
            starter.kill()
        killed = world.state is not WorldState.RETIRING  # Otherwise they were killed by the session, or died in a test.
        world.gone()
        self._record("WorldGone", world=world.spec.world)
        WorldInspector(self.directory, world.spec).remove_files()
        self._observer.on_gone(world, killed=killed)
        self._changed.notify_all()

    def watch_exit(self, number: int, rank: int, on_exit: Callable[[RankExit | None], None]) -> None:
        """Call `on_exit` with the rank's exit status once it has ended; with None if the status is unknown."""
        world = self.worlds.get(number)
        if world is None:
            on_exit(None)
        else:
            world.watch_exit(rank, on_exit)

    def end_worlds(self, *, gracefully: bool) -> None:
        """Terminate all worlds, and wait until their processes have ended; the lock is released while waiting.

        With `gracefully`, idle worlds tear down their session fixtures first.
        """
        self.closing = True
        for world in list(self.worlds.values()):
            if gracefully and world.state is WorldState.IDLE:
                self.retire(world, _SESSION_ENDS)
            elif world.state not in (WorldState.RETIRING, WorldState.KILLED) or not gracefully:
                self.kill(world, _SESSION_ENDS)
        deadline = monotonic() + RETIRE_TIMEOUT + _REPORTING_TIMEOUT
        while self.worlds and (left := min(deadline, self._last_end()) - monotonic()) > 0:
            self._changed.wait(left)
        for world in list(self.worlds.values()):
            if world.state is WorldState.RETIRING:
                self._summary.add_unknown_teardown(world)
                self.kill(world, _SESSION_ENDS)
            self._summary.add_survivors(world)

    def _last_end(self) -> float:
        """Return the time until which a world may end: without a limit, unless all have processes that live on."""
        if not all(world.survivors for world in self.worlds.values()):
            return math.inf
        return max(world.survived_since for world in self.worlds.values()) + KILL_TIMEOUT

    def stop_starters(self) -> None:
        """Terminate the fork servers, the MPI jobs and all their processes, and remove the session's folder.

        Callers do not hold the lock: the threads that this method joins may be waiting for it.
        """
        with self._lock:
            starters = list(self._own_starters.values())
            for starter in starters:
                starter.kill()
        stopped = [starter.stop() for starter in (*starters, self._servers)]
        if self.broken is not None or not all(stopped):  # The thread that cleans up after the server may have failed.
            with suppress(Exception):  # An unreadable /proc, for example, may be the cause of the failure.
                self._summary.add_left(kill_marked(self.directory))
        with self._lock:
            # Worlds with survivors last: the last holder of a shared device stays in its lock file.
            for world in sorted(self.worlds.values(), key=lambda world: bool(world.survivors)):
                self._forget(world)
        session_folder.remove(self.directory)

    # Callbacks of the starters, in their threads

    def _handle_message(self, message: object) -> None:
        with self._lock:
            if isinstance(message, WorldStarted):
                self._started(message)
            elif isinstance(message, StartFailed):
                self._start_failed(message)
            elif isinstance(message, RankExited):
                self._exited(message)
            elif isinstance(message, PreloadFailed):
                self._break(message.text)
            elif isinstance(message, Survivors):
                self._survived(message)
            elif isinstance(message, ServerNote):
                self._summary.add_note(message.text)

    def _started(self, message: WorldStarted) -> None:
        world = self.worlds.get(message.world)
        if world is not None and world.state is WorldState.STARTING:
            world.started(message.pids)
            self._record("WorldReady", world=message.world, pids=message.pids)
            self._observer.on_started(world)

    def _start_failed(self, message: StartFailed) -> None:
        world = self.worlds.get(message.world)
        if world is not None:
            self._forget(world)
            separator = "\n" if "\n" in message.text else " "
            self._observer.on_not_started(world, f"the ranks could not be started:{separator}{message.text}")

    def _exited(self, message: RankExited) -> None:
        world = self.worlds.get(message.world)
        if world is None:
            return
        world.rank_exited(message.rank, message.exit)
        if world.state is WorldState.RETIRING and message.exit.status != RETIRED:
            self._summary.add_failed_teardown(world, message.rank, message.exit)
        elif world.state is WorldState.IDLE:
            self._summary.add_death(world, message.rank, message.exit)
            self.kill(world, "a rank has ended")
        if world.ended and world.state in (WorldState.RETIRING, WorldState.KILLED):
            self._forget(world)

    def _survived(self, message: Survivors) -> None:
        world = self.worlds.get(message.world)
        if world is None:
            return
        world.record_survivors(message.server, message.processes)
        if message.processes:
            self._observer.on_survivors(world)
        if world.ended and world.ending:
            self._forget(world)
        self._changed.notify_all()

    def _server_ended(self, number: int, loss: str | None) -> None:
        """Handle the end of a fork server, with which its ranks end. Called with the lock held.

        The drivers return the worlds in use. All others with such ranks are killed, and those that were being started
        are reported to the observer. `loss` says why the server's machine counts as lost, with its name.
        """
        ended = [world for world in self._forked_worlds() if number in world.spec.server_numbers]
        end = RankExit(ExitCause.SERVER_ENDED) if loss is None else RankExit(ExitCause.MACHINE_LOST, about=loss)
        for world in ended:
            _mark_dead(world, number, end)  # Before the slow cleanup, since the drivers wait for it.
        self._summary.add_left(kill_marked(self.directory, number))
        starting = [world for world in ended if world.state is WorldState.STARTING]
        for world in ended:
            if world.state is WorldState.IN_USE:
                continue
            if world.state is WorldState.RETIRING and self.closing:
                self._summary.add_unknown_teardown(world)
            if world.state is WorldState.KILLED:
                self._kill_after(world, 0.0)
            else:
                self.kill(world, "its fork server has ended" if loss is None else f"its machine is lost: {loss}")
        for world in starting:
            why = f"the fork server ended twice while starting a world\n{self.server_log((number,))}"
            self._observer.on_lost(world, why if loss is None else f"a machine of this session is lost: {loss}")

    def _forked_worlds(self) -> list[PooledWorld]:
        """Return the worlds whose ranks come from the session's fork servers."""
        return [world for number, world in self.worlds.items() if number not in self._own_starters]

    def _own_starter_ended(self, world: PooledWorld, first_server: int) -> None:
        """Handle the end of the starter of one world; called with the lock held.

        The log of `first_server` is that of all its processes.
        """
        self._own_starters.pop(world.spec.world)
        for server in tuple(world.survivors):  # No server is left that would report their end.
            self._summary.add_left(world.survivors[server])
            world.record_survivors(server, ())
        if world.state in (WorldState.GONE, WorldState.IN_USE):
            return  # The exit of each rank has been reported, and the driver returns the world.
        starting = world.state is WorldState.STARTING
        self._forget(world)
        if starting:
            self._observer.on_not_started(
                world, f"the MPI job of the ranks has ended:\n{self.server_log((first_server,))}"
            )

    def _tick(self) -> None:
        with self._lock:
            now = monotonic()
            starting = [one for one in self.worlds.values() if one.state is WorldState.STARTING]
            late = [one for one in starting if now - one.since > START_TIMEOUT]
            for world in late:
                self._kill_servers(world, world.spec.server_numbers)
            for world in self.worlds.values():
                deadline = world.retire_deadline if world.state is WorldState.RETIRING else None
                if deadline is not None and 0 < deadline - now < _STACKS_BEFORE_KILL:
                    self._take_stacks(world)
                world.tick()
                if world.ticks_after_kill == _ANSWER_TICKS:
                    self._kill_servers(world, world.unanswered)
            self._observer.on_tick()

    def _kill_servers(self, world: PooledWorld, numbers: Collection[int]) -> None:
        """Kill fork servers of a world that do not answer; their end ends it."""
        own = self._own_starters.get(world.spec.world)
        if own is not None:
            own.kill()
        else:
            self._servers.kill(numbers)

    def _take_stacks(self, world: PooledWorld) -> None:
        """Record the stacks of the ranks that still run, unless they are known."""
        unknown = {rank: pid for rank, pid in world.alive.items() if not world.stacks.get(rank)}
        if unknown:
            world.record_stacks(WorldInspector(self.directory, world.spec).ask(MachineInspector.stacks, unknown))

    def server_log(self, numbers: Iterable[int]) -> str:
        """Return the end of the log of each of these fork servers."""
        logs = (tail(server_log_path(self.directory, number)) for number in numbers)
        return "\n".join(filter(None, logs))


def _mark_dead(world: PooledWorld, server: int, end: RankExit) -> None:
    """Report the ranks of a fork server as ended."""
    for rank in range(world.spec.ranks):
        if world.spec.server_of(rank) == server:
            world.rank_exited(rank, end)
    world.record_survivors(server, ())


def _ignore_end(server: int, loss: str | None) -> None:
    """Ignore the end of a fork server of an MPI job, which reports the job's own end."""
