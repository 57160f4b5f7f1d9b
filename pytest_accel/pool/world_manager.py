"""The processes of a session's worlds: started, retired and killed through the starters that this module owns."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Protocol

from pytest_accel.core import shared_memory
from pytest_accel.core.clock import monotonic
from pytest_accel.core.connect import call_rank
from pytest_accel.core.kill import kill_marked
from pytest_accel.core.rank_exit import ExitCause, RankExit
from pytest_accel.core.rank_messages import RETIRED, Retire
from pytest_accel.core.record_events import Recorder, WorldEnding, WorldGone, WorldReady
from pytest_accel.core.server_messages import (
    ImportedAhead,
    KeepOut,
    KillWorld,
    Preload,
    RankExited,
    ServerNote,
    StartFailed,
    StartWorld,
    WorldStarted,
)
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.timeouts import START_TIMEOUT
from pytest_accel.core.world_key import WorldKey
from pytest_accel.diagnostics.exit_status import tail
from pytest_accel.diagnostics.inspector import NodeInspector, WorldInspector
from pytest_accel.forkserver.server_client import ForkServerClient, Spawn, StarterCallbacks
from pytest_accel.forkserver.server_group import ForkServerGroup
from pytest_accel.nodes.mpi import MpiJob
from pytest_accel.pool.pooled_world import RETIRE_TIMEOUT, PooledWorld, WorldState
from pytest_accel.pool.summary import PoolSummary

_STACKS_BEFORE_KILL = 3.0
"""Seconds between taking the stacks of a retiring world and killing it.

The tick that takes the stacks may be a second late, and taking them may last another second.
"""
_SESSION_ENDS = "the session ends"


class WorldStarter(Protocol):
    """A starter of the processes of worlds: a fork server, several that serve as one, or an MPI job.

    It reports to :class:`StarterCallbacks`.
    """

    @property
    def lost(self) -> frozenset[int]:
        """The numbers of the fork servers with a lost connection to their machine."""

    @property
    def log_paths(self) -> tuple[str, ...]:
        """The files with the output of its processes."""

    def send(self, message: object) -> None:
        """Send a message of :mod:`pytest_accel.core.server_messages`. Never raise: `on_end` reports an exit."""

    def kill(self) -> None:
        """Kill its processes. `on_end` is called as soon as they have exited."""

    def stop(self) -> None:
        """Stop its processes, and wait for their exit. The caller must not hold the lock."""


class WorldObserver(Protocol):
    """The callbacks of a :class:`WorldManager`. Each is called with the lock held."""

    def on_started(self, world: PooledWorld) -> None:
        """Handle a world whose processes have started."""

    def on_not_started(self, world: PooledWorld, why: str) -> None:
        """Handle a world that could not be started; the manager has forgotten it."""

    def on_lost(self, world: PooledWorld) -> None:
        """Handle a world whose fork server ended while starting it; the manager has forgotten the world."""

    def on_gone(self, world: PooledWorld, *, killed: bool) -> None:
        """Handle a world whose processes have all ended, so that its devices are free; `killed` if they were killed."""

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
        lock: threading.RLock,
        observer: WorldObserver,
        summary: PoolSummary,
        spawns: Sequence[Spawn],
        record: Recorder,
    ) -> None:
        """`spawns` start the fork servers from which ranks are forked. `record` gets the events of the worlds."""
        self.worlds: dict[int, PooledWorld] = {}
        self.closing = False
        self.broken: str | None = None
        """The error after which no world can be started any more; None if there was none."""
        self.directory = spec.directory
        self._spec = spec
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._observer = observer
        self._summary = summary
        self._spawns = spawns
        self._record = record
        self._server: WorldStarter | None = None
        """The fork server, or several that serve as one: the starter of all worlds that have none of their own."""
        self._server_logs: tuple[str, ...] = ()
        """The log files of the present fork server, or of the last one."""
        self._preloads = True
        """True if the fork server preloads modules; False once it replaces one that has ended."""
        self._own_starters: dict[int, WorldStarter] = {}
        """The starters that serve one world each, by its number."""
        self._next_server = len(spawns)
        """The number of the next fork server of an MPI job."""

    def warm(self) -> None:
        """Start the fork server if it is not running."""
        if self._server is None and not self.closing:
            callbacks = self._callbacks(self._server_ended)
            if len(self._spawns) == 1:
                self._server = ForkServerClient(self._spec, callbacks)
            else:
                self._server = ForkServerGroup(self._spec, callbacks, self._lock, self._spawns)
            self._server_logs = self._server.log_paths

    def _callbacks(self, on_end: Callable[[], None]) -> StarterCallbacks:
        return StarterCallbacks(self._handle_message, on_end, self._tick, self.fail)

    def preload(self, modules: tuple[str, ...]) -> None:
        """Have the fork server import `modules`, unless it has worlds or the imports would make forking unsafe.

        A server that replaces one that has ended preloads nothing.
        """
        if self._server is not None and self._preloads and not self._spec.bare:
            self._server.send(Preload(modules))

    def import_nothing_ahead(self, why: str) -> None:
        """Have ranks forked from a server that has imported only torch and pytest, from now on.

        A running server is replaced unless there are worlds.
        """
        if self._spec.bare:
            return
        self._import_little(why)
        if self._server is not None and not self.worlds:
            self._server.kill()

    def keep_out(self, modules: tuple[str, ...]) -> None:
        """Have ranks forked from a server that has not preloaded any of `modules`."""
        if self._server is not None and not self._spec.bare and modules:
            self._server.send(KeepOut(modules))

    def _import_little(self, why: str) -> None:
        """Have later fork servers import only torch and pytest."""
        self._spec = replace(self._spec, bare=True)
        self._summary.add_note(f"preload: nothing but torch and pytest, since {why}")

    def start(self, world: PooledWorld) -> None:
        """Start the processes of a world; the observer gets the result."""
        self.worlds[world.spec.world] = world
        try:
            if world.spec.key.launcher is not None:
                self._own_starters[world.spec.world] = self._start_job(world, world.spec.key.launcher)
            else:
                self.warm()
                assert self._server is not None
                self._server.send(StartWorld(world.spec))
        except Exception:  # For example no memory for a process. Without an answer, the driver would wait forever.
            self._start_failed(StartFailed(world.spec.world, traceback.format_exc()))

    def _start_job(self, world: PooledWorld, launcher: str) -> WorldStarter:
        first = self._next_server
        self._next_server += world.spec.ranks
        spec = replace(world.spec, servers=tuple(range(first, self._next_server)))
        callbacks = self._callbacks(partial(self._own_starter_ended, world))
        return MpiJob(self._spec, callbacks, self._lock, launcher, spec)

    def find_idle(self, key: WorldKey) -> PooledWorld | None:
        """Return an idle world of `key` whose ranks are all alive, or None."""
        for world in self.worlds.values():
            if world.state is WorldState.IDLE and world.spec.key == key and not world.exits:
                return world
        return None

    def kill(self, world: PooledWorld, why: str) -> None:
        """Kill the processes of a world at once, because of `why`."""
        world.kill()
        self._record(WorldEnding(world.spec.world, why, killed=True))
        self._kill_after(world, 0.0)

    def revoke(self, world: PooledWorld, why: str) -> None:
        """Kill the processes of a world at once, since it has lost the right to use its devices."""
        if world.state is WorldState.IN_USE:
            # The driver returns the world once it has noticed that the ranks are dead.
            world.revoke(RankExit(ExitCause.LOCK_LOST))
            self._summary.errors.append(why)
            self._record(WorldEnding(world.spec.world, why, killed=True))
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
            self.broken = "\n".join(filter(None, (hint, why.rstrip(), self.server_log())))
            self._summary.errors.append(self.broken)
            for starter in (self._server, *self._own_starters.values()):
                if starter is not None:
                    with contextlib.suppress(Exception):
                        starter.kill()
            self._observer.on_failure(self.broken)
            for world in list(self.worlds.values()):
                with contextlib.suppress(Exception):
                    self._forget(world)
            self._changed.notify_all()

    def retire(self, world: PooledWorld, why: str, *, quietly: bool = False) -> None:
        """Have the ranks end their pytest sessions because of `why`; kill those that run after `RETIRE_TIMEOUT`.

        With `quietly`, errors in this are not reported.
        """
        world.retire(quietly=quietly)
        self._record(WorldEnding(world.spec.world, why))
        for rank, pid in enumerate(world.pids):
            with contextlib.suppress(OSError):
                Connection(call_rank(self.directory, world.spec, rank, pid).detach()).send(Retire())
        self._kill_after(world, RETIRE_TIMEOUT)

    def _kill_after(self, world: PooledWorld, seconds: float) -> None:
        """Have the world's processes killed in some seconds, in which they may exit by themselves."""
        starter = self._starter_of(world)
        if world.ended or starter is None:
            self._forget(world)
        else:
            starter.send(KillWorld(world.spec.world, seconds))

    def _starter_of(self, world: PooledWorld) -> WorldStarter | None:
        return self._own_starters.get(world.spec.world, self._server)

    def _forget(self, world: PooledWorld) -> None:
        """Remove a world whose processes have ended, and tell the observer."""
        if self.worlds.pop(world.spec.world, None) is None:
            return
        if (starter := self._own_starters.get(world.spec.world)) is not None:
            starter.kill()
        killed = world.state is WorldState.KILLED
        world.gone()
        self._record(WorldGone(world.spec.world))
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
        deadline = monotonic() + RETIRE_TIMEOUT + 2
        while self.worlds and self._server is not None and (left := deadline - monotonic()) > 0:
            self._changed.wait(left)

    def stop_starters(self) -> None:
        """Terminate the fork server, the MPI jobs and all their processes, and remove the session's folder.

        Callers do not hold the lock: the threads that this method joins may be waiting for it.
        """
        with self._lock:
            server, self._server = self._server, None
            starters = list(self._own_starters.values())
            for starter in starters:
                starter.kill()
        for starter in starters:
            starter.stop()
        if server is not None:
            server.stop()
        if self.broken is not None:  # The thread that cleans up after the server may have failed.
            with contextlib.suppress(Exception):  # An unreadable /proc, for example, may be the cause of the failure.
                kill_marked(self.directory)
                shared_memory.remove_all(self.directory)
        with self._lock:
            for world in list(self.worlds.values()):
                self._forget(world)
        shutil.rmtree(self.directory, ignore_errors=True)

    # Callbacks of the starters, in their threads

    def _handle_message(self, message: object) -> None:
        with self._lock:
            if isinstance(message, WorldStarted):
                self._started(message)
            elif isinstance(message, StartFailed):
                self._start_failed(message)
            elif isinstance(message, RankExited):
                self._exited(message)
            elif isinstance(message, ImportedAhead) and not self._spec.bare:
                self._import_little(f"the session does not import {message.module} as a plain Python does")
            elif isinstance(message, ServerNote):
                self._summary.add_note(message.text)

    def _started(self, message: WorldStarted) -> None:
        world = self.worlds.get(message.world)
        if world is not None and world.state is WorldState.STARTING:
            world.started(message.pids)
            self._record(WorldReady(message.world, message.pids))
            self._observer.on_started(world)

    def _start_failed(self, message: StartFailed) -> None:
        world = self.worlds.get(message.world)
        if world is not None:
            self._forget(world)
            self._observer.on_not_started(world, f"the ranks could not be started:\n{message.text}")

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

    def _server_ended(self) -> None:
        """Handle the end of the fork server, with which all ranks end.

        The ranks of worlds in use count as dead. Worlds that were being started are reported to the observer.
        """
        with self._lock:
            if self._server is None:
                return
            worlds, lost = list(self.worlds.values()), self._server.lost
            starting = [world for world in worlds if world.state is WorldState.STARTING]
            if not self.closing:
                self._server, self._preloads = None, False
                for world in worlds:
                    if world.state is WorldState.IN_USE:
                        _mark_dead(world, lost)  # Before the slow cleanup, since the drivers wait for it.
            kill_marked(self.directory)
            shared_memory.remove_all(self.directory)
            for world in worlds:
                if self.closing and world.state is WorldState.RETIRING:
                    self._summary.add_unknown_teardown(world)
                if self.closing or world.state is not WorldState.IN_USE:
                    self._forget(world)
            if self.closing:
                return
            for world in starting:
                if lost:
                    why = "a node of this session is lost: it does not answer any more"
                    self._observer.on_not_started(world, why)
                else:
                    self._observer.on_lost(world)

    def _own_starter_ended(self, world: PooledWorld) -> None:
        """Handle the end of the starter of one world; called with the lock held."""
        starter = self._own_starters.pop(world.spec.world)
        if world.state in (WorldState.GONE, WorldState.IN_USE):
            return  # The exit of each rank has been reported, and the driver returns the world.
        starting = world.state is WorldState.STARTING
        self._forget(world)
        if starting:
            self._observer.on_not_started(world, f"the MPI job of the ranks has ended:\n{_tails(starter.log_paths)}")

    def _tick(self) -> None:
        with self._lock:
            now = monotonic()
            for starter in {
                self._starter_of(world)
                for world in self.worlds.values()
                if world.state is WorldState.STARTING and now - world.since > START_TIMEOUT
            }:
                if starter is not None:
                    starter.kill()
            for world in self.worlds.values():
                late = world.retire_deadline is not None and now > world.retire_deadline - _STACKS_BEFORE_KILL
                if world.state is WorldState.RETIRING and late and world.stacks is None:
                    inspector = WorldInspector(self.directory, world.spec)
                    world.record_stacks(inspector.ask(NodeInspector.stacks, world.alive))
            self._observer.on_tick()

    def server_log(self) -> str:
        """Return the end of each fork server's log."""
        return _tails(self._server_logs)


def _mark_dead(world: PooledWorld, lost: frozenset[int]) -> None:
    """Report every rank as ended with its fork server, or with its node if the server is one of `lost`."""
    for rank in range(world.spec.ranks):
        cause = ExitCause.NODE_LOST if world.spec.server_of(rank) in lost else ExitCause.SERVER_ENDED
        world.rank_exited(rank, RankExit(cause))


def _tails(paths: Sequence[str]) -> str:
    return "\n".join(filter(None, (tail(path) for path in paths)))
