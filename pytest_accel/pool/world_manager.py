"""The processes of a session's worlds: started, retired and killed through the fork server, which this module owns."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Protocol

from pytest_accel.core import paths, shared_memory
from pytest_accel.core.clock import monotonic
from pytest_accel.core.connect import call_rank
from pytest_accel.core.kill import kill_marked
from pytest_accel.core.rank_exit import ExitCause, RankExit, exited
from pytest_accel.core.rank_messages import RETIRED, Retire
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
from pytest_accel.diagnostics.diagnosis import Examiner, Interrupted
from pytest_accel.diagnostics.exit_status import describe_exit, tail, where
from pytest_accel.diagnostics.inspector import NodeInspector, WorldInspector
from pytest_accel.forkserver.server_client import Spawn, Starter, spawn_here
from pytest_accel.forkserver.server_group import Servers
from pytest_accel.nodes.mpi import MpiJob
from pytest_accel.pool.records import PooledWorld

RETIRE_TIMEOUT = 10.0
"""Seconds that the ranks of a retired world have to tear down their session fixtures."""
_STACKS_BEFORE_KILL = 3.0
"""Seconds between taking the stacks of a retiring world and killing it.

The tick that takes the stacks may be a second late, and taking them may last another second.
"""


class WorldObserver(Protocol):
    """The callbacks of a :class:`WorldManager`. Each is called with the lock held."""

    def on_started(self, world: PooledWorld) -> None:
        """Handle a world whose processes have started."""

    def on_not_started(self, world: PooledWorld, why: str) -> None:
        """Handle a world that could not be started; the manager has forgotten it."""

    def on_lost(self, world: PooledWorld) -> None:
        """Handle a world whose fork server ended while starting it; the manager has forgotten the world."""

    def on_gone(self, world: PooledWorld) -> None:
        """Handle a world whose processes have all ended, so that its devices are free."""

    def on_failure(self, why: str) -> None:
        """Handle an error after which no world can be started in this session."""

    def on_tick(self) -> None:
        """Do periodic work; called about once a second."""


class WorldManager:
    """All worlds that have processes, and the fork server that starts them. Owned by the pool.

    Callers hold `lock`, except for :meth:`stop_server`, and :meth:`fail`, which takes it.
    """

    def __init__(
        self,
        spec: SessionSpec,
        lock: threading.RLock,
        observer: WorldObserver,
        servers: Sequence[Spawn] = (spawn_here,),
    ) -> None:
        """`servers` start the fork servers from which ranks are forked."""
        self.worlds: dict[int, PooledWorld] = {}
        self.complaints: list[str] = []
        """Errors that belong to no test, such as one in the teardown of a session fixture."""
        self.notes: list[str] = []
        """Lines to show with ``-v``."""
        self._interrupted: dict[int, Interrupted] = {}
        """The tests that were running when the session was interrupted, by world number."""
        self.closing = False
        self.broken: str | None = None
        """The error after which no world can be started any more; None if there was none."""
        self.directory = spec.directory
        self._spec = spec
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._observer = observer
        self._servers = servers
        self._starter: Starter | Servers | None = None
        self._preload = True
        self._jobs: dict[int, MpiJob] = {}
        """The MPI jobs, by world number."""
        self._servers_made = len(servers)

    def warm(self) -> None:
        """Start the fork server if it is not running."""
        if self._starter is None and not self.closing:
            if len(self._servers) == 1:
                self._starter = Starter(self._spec, self._event, self._server_ended, self._tick, self.fail)
            else:
                self._starter = Servers(
                    self._servers, self._lock, self._spec, self._event, self._server_ended, self._tick, self.fail
                )

    def preload(self, modules: tuple[str, ...]) -> None:
        """Have the fork server import `modules`, unless it has worlds or the imports would make forking unsafe.

        A server that replaces one that has ended preloads nothing.
        """
        if self._starter is not None and self._preload and not self._spec.bare:
            self._starter.send(Preload(modules))

    def import_nothing_ahead(self, why: str) -> None:
        """Have ranks forked from a server that has imported only torch and pytest, from now on.

        A running server is replaced unless there are worlds.
        """
        if self._spec.bare:
            return
        self._go_bare(why)
        if self._starter is not None and not self.worlds:
            self._starter.kill()

    def keep_out(self, modules: tuple[str, ...]) -> None:
        """Have ranks forked from a server that has not preloaded any of `modules`."""
        if self._starter is not None and not self._spec.bare and modules:
            self._starter.send(KeepOut(modules))

    def _go_bare(self, why: str) -> None:
        self._spec = replace(self._spec, bare=True)
        self.notes.append(f"preload: nothing but torch and pytest, since {why}")

    def start(self, world: PooledWorld) -> None:
        """Start the processes of a world; the observer gets the result."""
        self.worlds[world.spec.world] = world
        try:
            self.warm()
            assert self._starter is not None
            if world.spec.key.launcher is None:
                self._starter.send(StartWorld(world.spec))
            else:
                self._start_job(world, world.spec.key.launcher)
        except Exception:  # For example no memory for a process. Without an answer, the driver would wait forever.
            self._start_failed(StartFailed(world.spec.world, traceback.format_exc()))

    def _start_job(self, world: PooledWorld, launcher: str) -> None:
        first = self._servers_made
        self._servers_made += world.spec.ranks
        numbers = range(first, self._servers_made)
        job = MpiJob(launcher, world.spec, numbers, self._spec, self._lock, self._event, self._job_ended, self.fail)
        self._jobs[world.spec.world] = job

    def idle(self, key: WorldKey) -> PooledWorld | None:
        """Return an idle world of `key` whose ranks are all alive, or None."""
        for world in self.worlds.values():
            if world.state == "idle" and world.spec.key == key and not world.exits:
                return world
        return None

    def kill(self, world: PooledWorld) -> None:
        """Kill the processes of a world at once."""
        world.state = "killed"
        self._end(world, 0.0)

    def revoke(self, world: PooledWorld, why: str) -> None:
        """Kill the processes of a world at once, since it has lost the right to use its devices."""
        if world.state == "leased":
            # The driver returns the world once it has noticed that the ranks are dead.
            world.forced_exit = RankExit(ExitCause.LOCK_LOST)
            self.complaints.append(why)
            self._end(world, 0.0)
        elif world.state == "starting":
            self.kill(world)
            self._observer.on_not_started(world, why)
        elif world.state in ("idle", "retiring"):
            self.kill(world)

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
            self.complaints.append(self.broken)
            ends = [job.end for job in self._jobs.values()]
            for end in ends if self._starter is None else [self._starter.kill, *ends]:
                with contextlib.suppress(Exception):
                    end()
            self._observer.on_failure(self.broken)
            for world in list(self.worlds.values()):
                with contextlib.suppress(Exception):
                    self._forget(world)
            self._changed.notify_all()

    def retire(self, world: PooledWorld) -> None:
        """Have the ranks end their pytest sessions; kill those that still run after `RETIRE_TIMEOUT`."""
        world.state, world.retired_at = "retiring", monotonic()
        for rank, pid in enumerate(world.pids):
            with contextlib.suppress(OSError):
                Connection(call_rank(self.directory, world.spec, rank, pid).detach()).send(Retire())
        self._end(world, RETIRE_TIMEOUT)

    def _end(self, world: PooledWorld, after: float) -> None:
        starter = self._jobs.get(world.spec.world, self._starter)
        if world.ended or starter is None:
            self._forget(world)
        else:
            starter.send(KillWorld(world.spec.world, after))

    def _forget(self, world: PooledWorld) -> None:
        """Remove a world whose processes have ended, and tell the observer."""
        if self.worlds.pop(world.spec.world, None) is None:
            return
        if (job := self._jobs.get(world.spec.world)) is not None:
            job.end()
        for _, on_exit in world.exit_callbacks:
            on_exit(None)
        WorldInspector(self.directory, world.spec).remove_files()
        self._observer.on_gone(world)
        self._changed.notify_all()

    def watch_exit(self, number: int, rank: int, on_exit: Callable[[RankExit | None], None]) -> None:
        """Call `on_exit` with the rank's exit status once it has ended; with None if the status is unknown."""
        world = self.worlds.get(number)
        if world is None:
            on_exit(None)
        elif rank in world.exits:
            on_exit(world.exits[rank])
        else:
            world.exit_callbacks.append((rank, on_exit))

    def end_worlds(self, *, politely: bool) -> None:
        """Terminate all worlds, and wait until their processes have ended; the lock is released while waiting.

        With `politely`, idle worlds tear down their session fixtures first.
        """
        self.closing = True
        for world in list(self.worlds.values()):
            if politely and world.state == "idle":
                self.retire(world)
            elif world.state not in ("retiring", "killed") or not politely:
                self.kill(world)
        deadline = monotonic() + RETIRE_TIMEOUT + 2
        while self.worlds and self._starter is not None and (left := deadline - monotonic()) > 0:
            self._changed.wait(left)

    def stop_server(self) -> None:
        """Terminate the fork server, the MPI jobs and all their processes, and remove the session's folder.

        Callers do not hold the lock: the threads that this method joins may be waiting for it.
        """
        with self._lock:
            starter, self._starter = self._starter, None
            jobs = list(self._jobs.values())
            for job in jobs:
                job.end()
        for job in jobs:
            job.join()
        if starter is not None:
            starter.stop()
        if self.broken is not None:  # The thread that cleans up after the server may have failed.
            with contextlib.suppress(
                Exception
            ):  # For example if /proc cannot be read, a possible cause of the failure.
                kill_marked(self.directory)
                shared_memory.remove_all(self.directory)
        with self._lock:
            for world in list(self.worlds.values()):
                self._forget(world)
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def interrupted(self) -> list[Interrupted]:
        """The tests that ran when the session was interrupted."""
        return list(self._interrupted.values())

    def look_at_interrupted(self, world: PooledWorld, test: str) -> None:
        """Record where the ranks of a world are when the session is interrupted; a later call only adds the test.

        An empty `test` means that it is unknown. The world may then be between two tests, in which case it is left out.
        """
        recorded = self._interrupted.get(world.spec.world)
        if recorded is not None:
            if test and not recorded.test:
                self._interrupted[world.spec.world] = replace(recorded, test=test)
            return
        ends = {rank: describe_exit(end) for rank, end in world.exits.items()}
        alive = {rank: pid for rank, pid in enumerate(world.pids) if rank not in ends}
        examiner = Examiner(WorldInspector(self.directory, world.spec), grouped=world.spec.grouped)
        stacks, findings = examiner.hung(alive, alive, thoroughly=False)
        between_tests = not test and not ends and all(stack and not where(stack) for stack in stacks.values())
        if between_tests and not findings.collectives:
            return
        self._interrupted[world.spec.world] = Interrupted(test, ends, stacks, findings)

    def complain(self, world: PooledWorld, rank: int, end: RankExit, what: str) -> None:
        """Report the exit of a rank that no test has reported."""
        self._complain(world, rank, f"{what} ({describe_exit(end)})")

    def _complain(self, world: PooledWorld, rank: int, *texts: str) -> None:
        log = WorldInspector(self.directory, world.spec).ask(NodeInspector.logs, {rank: None}).get(rank, "")
        about = f"rank {rank} of a world of {world.spec.ranks} "
        self.complaints.append(about + "\n".join(filter(None, (*texts, log))))

    def _complain_of_teardown(self, world: PooledWorld, rank: int, end: RankExit) -> None:
        if end != exited(-signal.SIGKILL) or monotonic() < world.retired_at + RETIRE_TIMEOUT:
            self.complain(world, rank, end, "exited before the end of its session")
            return
        stack = (world.stacks or {}).get(rank, "")
        place = f"; it was at {frame}" if (frame := where(stack)) else ""
        self._complain(
            world, rank, f"did not end its session within {RETIRE_TIMEOUT:.0f} s and was killed{place}", stack
        )

    # Callbacks of the fork server's client and of MPI jobs, in their threads

    def _event(self, message: object) -> None:
        with self._lock:
            if isinstance(message, WorldStarted):
                self._started(message)
            elif isinstance(message, StartFailed):
                self._start_failed(message)
            elif isinstance(message, RankExited):
                self._exited(message)
            elif isinstance(message, ImportedAhead) and not self._spec.bare:
                self._go_bare(f"the session does not import {message.module} as a plain Python does")
            elif isinstance(message, ServerNote) and message.text not in self.notes:  # Several servers may send it.
                self.notes.append(message.text)

    def _started(self, message: WorldStarted) -> None:
        world = self.worlds.get(message.world)
        if world is not None and world.state == "starting":
            world.pids = message.pids
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
        end = world.forced_exit or message.exit
        world.exits[message.rank] = end
        for entry in [entry for entry in world.exit_callbacks if entry[0] == message.rank]:
            world.exit_callbacks.remove(entry)
            entry[1](end)
        if world.state == "retiring" and message.exit.status != RETIRED:
            self._complain_of_teardown(world, message.rank, message.exit)
        elif world.state == "idle":
            self.complain(world, message.rank, message.exit, "died after its last test had passed")
            self.kill(world)
        if world.ended and world.state in ("retiring", "killed"):
            self._forget(world)

    def _server_ended(self) -> None:
        """Handle the end of the fork server, with which all ranks end.

        The ranks of leased worlds count as dead. Worlds that were being started are reported to the observer.
        """
        with self._lock:
            if self._starter is None:
                return
            worlds, lost = list(self.worlds.values()), self._starter.lost
            if not self.closing:
                self._starter, self._preload = None, False
                for world in worlds:
                    if world.state == "leased":
                        self._mark_dead(world, lost)  # Before the slow cleanup, since the drivers wait for it.
            kill_marked(self.directory)
            shared_memory.remove_all(self.directory)
            for world in worlds:
                if self.closing and world.state == "retiring":
                    self.complain(world, 0, exited(-signal.SIGKILL), "may not have torn down its session fixtures")
                if self.closing or world.state != "leased":
                    self._forget(world)
            for world in worlds:
                if not self.closing and world.state == "starting":
                    if lost:
                        why = "a node of this session is lost: it does not answer any more"
                        self._observer.on_not_started(world, why)
                    else:
                        self._observer.on_lost(world)

    def _job_ended(self, job: MpiJob) -> None:
        """Handle the end of an MPI job; called in the job's thread, with the lock held."""
        world = self.worlds.get(job.world.world)
        del self._jobs[job.world.world]
        if world is None or world.state == "leased":
            return  # The exit of each rank has been reported, and the driver returns the world.
        starting = world.state == "starting"
        self._forget(world)
        if starting:
            self._observer.on_not_started(world, f"the MPI job of the ranks has ended:\n{job.log}")

    def _mark_dead(self, world: PooledWorld, lost: frozenset[int]) -> None:
        """Report every rank as ended with its fork server, or with its node if the server is one of `lost`."""
        for rank in range(world.spec.ranks):
            cause = ExitCause.NODE_LOST if world.spec.server_of(rank) in lost else ExitCause.SERVER_ENDED
            world.exits.setdefault(rank, RankExit(cause))
        for rank, on_exit in world.exit_callbacks:
            on_exit(world.exits[rank])
        world.exit_callbacks.clear()

    def _tick(self) -> None:
        with self._lock:
            now = monotonic()
            stuck = [world for world in self.worlds.values() if world.state == "starting"]
            overdue = [world.spec.world for world in stuck if now - world.idle_since > START_TIMEOUT]
            for job in [self._jobs[number] for number in overdue if number in self._jobs]:
                job.end()
            if self._starter is not None and not self._jobs.keys() >= set(overdue):
                self._starter.kill()
            for world in self.worlds.values():
                late = now - world.retired_at > RETIRE_TIMEOUT - _STACKS_BEFORE_KILL
                if world.state == "retiring" and late and world.stacks is None:
                    alive = {rank: pid for rank, pid in enumerate(world.pids) if rank not in world.exits}
                    world.stacks = WorldInspector(self.directory, world.spec).ask(NodeInspector.stacks, alive)
            self._observer.on_tick()

    def server_log(self) -> str:
        """Return the end of each fork server's log."""
        numbers = range(len(self._servers))
        return "\n".join(filter(None, (tail(paths.server_log_path(self.directory, number)) for number in numbers)))
