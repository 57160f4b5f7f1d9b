"""The processes of a session's worlds: started, retired and killed through the fork server, which is kept here."""

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
from pytest_accel.core.messages import (
    RETIRED,
    ImportedAhead,
    KeepOut,
    KillWorld,
    Preload,
    RankExited,
    Retire,
    ServerNote,
    SessionSpec,
    StartFailed,
    StartWorld,
    WorldStarted,
)
from pytest_accel.core.world_key import WorldShape
from pytest_accel.diagnostics.diagnosis import Examiner, Interrupted
from pytest_accel.diagnostics.exit_status import LOCK_LOST, MACHINE_LOST, SERVER_ENDED, describe_exit, tail, where
from pytest_accel.diagnostics.inspector import Scout, Scouts
from pytest_accel.forkserver.server_client import Spawn, Starter, spawn_here
from pytest_accel.forkserver.server_group import Servers
from pytest_accel.nodes.mpi import MpiJob
from pytest_accel.pool.records import PooledWorld

RETIRE_PATIENCE = 10.0
"""Seconds that a retired world has for its session fixtures."""
_LOOK_BEFORE = 3.0
"""Seconds from the look at what keeps it until it is killed: the next tick may be one later, the stacks another."""
START_PATIENCE = 120.0
"""Seconds that the fork server may take to start a world, what it imports before that included."""


class Owner(Protocol):
    """Who is told of the worlds. Each method is called with the lock held."""

    def on_started(self, world: PooledWorld) -> None:
        """Its processes are there."""

    def on_not_started(self, world: PooledWorld, why: str) -> None:
        """It has no processes, and is forgotten."""

    def on_lost(self, world: PooledWorld) -> None:
        """The fork server ended while it was being started; it is forgotten."""

    def on_gone(self, world: PooledWorld) -> None:
        """Its processes are gone, and what they used is free."""

    def on_failure(self, why: str) -> None:
        """No world can be had any more in this session."""

    def on_tick(self) -> None:
        """About once a second."""


class Fleet:
    """All worlds that have processes. Its methods are called with `lock` held, but for :meth:`stop_server`."""

    def __init__(
        self, spec: SessionSpec, lock: threading.RLock, owner: Owner, servers: Sequence[Spawn] = (spawn_here,)
    ) -> None:
        """`servers` start the fork servers that ranks come from."""
        self.worlds: dict[int, PooledWorld] = {}
        self.complaints: list[str] = []
        """What went wrong outside of any test, such as an error in a session fixture's end."""
        self.notes: list[str] = []
        """What a person who asked for ``-v`` wants to know."""
        self._interrupted: dict[int, Interrupted] = {}
        """By world, the tests that ran when the session was interrupted."""
        self.closing = False
        self.broken: str | None = None
        """Why no more worlds can be started; None while they can."""
        self.directory = spec.directory
        self._spec = spec
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._owner = owner
        self._servers = servers
        self._starter: Starter | Servers | None = None
        self._preload = True
        self._jobs: dict[int, MpiJob] = {}
        """By the number of the world that each serves."""
        self._servers_made = len(servers)

    def warm(self) -> None:
        """Start the fork server, if it does not run."""
        if self._starter is None and not self.closing:
            if len(self._servers) == 1:
                self._starter = Starter(self._spec, self._event, self._server_ended, self._tick, self.fail)
            else:
                self._starter = Servers(
                    self._servers, self._lock, self._spec, self._event, self._server_ended, self._tick, self.fail
                )

    def preload(self, modules: tuple[str, ...]) -> None:
        """Have the fork server import `modules`, if it has no ranks yet and stays fit to fork."""
        if self._starter is not None and self._preload and not self._spec.bare:
            self._starter.send(Preload(modules))

    def import_nothing_ahead(self, why: str) -> None:
        """Have ranks come from a server that has imported nothing but torch and pytest, from now on.

        A running server is replaced, unless ranks have come from it.
        """
        if self._spec.bare:
            return
        self._go_bare(why)
        if self._starter is not None and not self.worlds:
            self._starter.kill()

    def keep_out(self, modules: tuple[str, ...]) -> None:
        """Have ranks come from a server that has not imported any of `modules` ahead."""
        if self._starter is not None and not self._spec.bare and modules:
            self._starter.send(KeepOut(modules))

    def _go_bare(self, why: str) -> None:
        self._spec = replace(self._spec, bare=True)
        self.notes.append(f"preload: nothing but torch and pytest, since {why}")

    def start(self, world: PooledWorld) -> None:
        """Start a world's processes."""
        self.worlds[world.spec.world] = world
        try:
            self.warm()
            assert self._starter is not None
            if world.shape.launcher is None:
                self._starter.send(StartWorld(world.spec))
            else:
                self._start_job(world, world.shape.launcher)
        except Exception:  # Such as no memory for a process: nobody else would answer whoever waits for the world.
            self._start_failed(StartFailed(world.spec.world, traceback.format_exc()))

    def _start_job(self, world: PooledWorld, launcher: str) -> None:
        first = self._servers_made
        self._servers_made += world.spec.ranks
        numbers = range(first, self._servers_made)
        job = MpiJob(launcher, world.spec, numbers, self._spec, self._lock, self._event, self._job_ended, self.fail)
        self._jobs[world.spec.world] = job

    def idle(self, shape: WorldShape) -> PooledWorld | None:
        """A warm world of `shape` that runs no test."""
        for world in self.worlds.values():
            if world.state == "idle" and world.shape == shape and not world.exits:
                return world
        return None

    def kill(self, world: PooledWorld) -> None:
        """End its processes at once."""
        world.state = "killed"
        self._end(world, 0.0)

    def revoke(self, world: PooledWorld, why: str) -> None:
        """End its processes at once, since they may not use their devices any more."""
        if world.state == "leased":
            # Its driver gives it back when it has found the ranks dead.
            world.killed_as = LOCK_LOST
            self.complaints.append(why)
            self._end(world, 0.0)
        elif world.state == "starting":
            self.kill(world)
            self._owner.on_not_started(world, why)
        elif world.state in ("idle", "retiring"):
            self.kill(world)

    def fail(self, why: str) -> None:
        """End all worlds for good, because a thread that they need has ended; `why` has its traceback.

        Takes the lock itself. Requests that wait get an error, and later requests are refused.
        """
        with self._lock:
            if self.broken is not None:
                return
            no_proc = sys.platform == "linux" and not os.path.exists("/proc/self/stat")
            hint = "/proc cannot be read: ranks cannot be started without it" if no_proc else ""
            self.broken = "\n".join(filter(None, (hint, why.rstrip(), self.server_log())))
            self.complaints.append(self.broken)
            for end in (self._starter.kill if self._starter else _nothing, *(job.end for job in self._jobs.values())):
                with contextlib.suppress(Exception):
                    end()
            self._owner.on_failure(self.broken)
            for world in list(self.worlds.values()):
                with contextlib.suppress(Exception):
                    self._forget(world)
            self._changed.notify_all()

    def retire(self, world: PooledWorld) -> None:
        """Have its pytest sessions end; what is left after a while is killed."""
        world.state, world.retired = "retiring", monotonic()
        for rank, pid in enumerate(world.pids):
            with contextlib.suppress(OSError):
                Connection(call_rank(self.directory, world.spec, rank, pid).detach()).send(Retire())
        self._end(world, RETIRE_PATIENCE)

    def _end(self, world: PooledWorld, after: float) -> None:
        starter = self._jobs.get(world.spec.world, self._starter)
        if world.ended or starter is None:
            self._forget(world)
        else:
            starter.send(KillWorld(world.spec.world, after))

    def _forget(self, world: PooledWorld) -> None:
        """Its processes are gone."""
        if self.worlds.pop(world.spec.world, None) is None:
            return
        if (job := self._jobs.get(world.spec.world)) is not None:
            job.end()
        for _, tell in world.watchers:
            tell(None)
        Scouts(self.directory, world.spec).remove_files()
        self._owner.on_gone(world)
        self._changed.notify_all()

    def watch_exit(self, number: int, rank: int, tell: Callable[[int | None], None]) -> None:
        """`tell` gets the rank's exit status when it has one; None where it cannot be known."""
        world = self.worlds.get(number)
        if world is None:
            tell(None)
        elif rank in world.exits:
            tell(world.exits[rank])
        else:
            world.watchers.append((rank, tell))

    def end_worlds(self, *, politely: bool) -> None:
        """End all worlds, for good; waits until their processes are gone, and lets go of the lock while it waits.

        `politely`: warm worlds tear their session fixtures down first.
        """
        self.closing = True
        for world in list(self.worlds.values()):
            if politely and world.state == "idle":
                self.retire(world)
            elif world.state not in ("retiring", "killed") or not politely:
                self.kill(world)
        deadline = monotonic() + RETIRE_PATIENCE + 2
        while self.worlds and self._starter is not None and (left := deadline - monotonic()) > 0:
            self._changed.wait(left)

    def stop_server(self) -> None:
        """End the fork server and all that came from it. Called without the lock, for which its thread may wait."""
        with self._lock:
            starter, self._starter = self._starter, None
            jobs = list(self._jobs.values())
            for job in jobs:
                job.end()
        for job in jobs:
            job.join()
        if starter is not None:
            starter.stop()
        if self.broken is not None:  # Nobody has heard of the server's end, nor has it cleaned up.
            with contextlib.suppress(Exception):  # As where /proc cannot be read, which may be why.
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
        """Note where the ranks of a world are when the session is interrupted, once.

        An empty `test` stands for one that is not known: the world may be between two, and is then left out.
        """
        known = self._interrupted.get(world.spec.world)
        if known is not None:
            if test and not known.test:
                self._interrupted[world.spec.world] = replace(known, test=test)
            return
        ends = {rank: describe_exit(status) for rank, status in world.exits.items()}
        alive = {rank: pid for rank, pid in enumerate(world.pids) if rank not in ends}
        examiner = Examiner(Scouts(self.directory, world.spec), grouped=world.spec.grouped)
        stacks, findings = examiner.hung(alive, alive, thoroughly=False)
        between = not test and not ends and all(stack and not where(stack) for stack in stacks.values())
        if between and not findings.collectives:
            return
        self._interrupted[world.spec.world] = Interrupted(test, ends, stacks, findings)

    def complain(self, world: PooledWorld, rank: int, status: int, what: str) -> None:
        """Say of a rank what no test could say."""
        self._complain(world, rank, f"{what} ({describe_exit(status)})")

    def _complain(self, world: PooledWorld, rank: int, *texts: str) -> None:
        log = Scouts(self.directory, world.spec).ask(Scout.logs, {rank: None}).get(rank, "")
        about = f"rank {rank} of a world of {world.spec.ranks} "
        self.complaints.append(about + "\n".join(filter(None, (*texts, log))))

    def _complain_of_end(self, world: PooledWorld, rank: int, status: int) -> None:
        if status != -signal.SIGKILL or monotonic() < world.retired + RETIRE_PATIENCE:
            self.complain(world, rank, status, "did not come to the end of its session")
            return
        stack = (world.stacks or {}).get(rank, "")
        place = f"; it was at {frame}" if (frame := where(stack)) else ""
        self._complain(
            world, rank, f"did not end its session within {RETIRE_PATIENCE:.0f} s and was killed{place}", stack
        )

    # The fork server's messages, in its thread

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
            elif isinstance(message, ServerNote) and message.text not in self.notes:  # Each of several says it.
                self.notes.append(message.text)

    def _started(self, message: WorldStarted) -> None:
        world = self.worlds.get(message.world)
        if world is not None and world.state == "starting":
            world.pids = message.pids
            self._owner.on_started(world)

    def _start_failed(self, message: StartFailed) -> None:
        world = self.worlds.get(message.world)
        if world is not None:
            self._forget(world)
            self._owner.on_not_started(world, f"the ranks could not be started:\n{message.text}")

    def _exited(self, message: RankExited) -> None:
        world = self.worlds.get(message.world)
        if world is None:
            return
        status = message.status if world.killed_as is None else world.killed_as
        world.exits[message.rank] = status
        for entry in [entry for entry in world.watchers if entry[0] == message.rank]:
            world.watchers.remove(entry)
            entry[1](status)
        if world.state == "retiring" and message.status != RETIRED:
            self._complain_of_end(world, message.rank, message.status)
        elif world.state == "idle":
            self.complain(world, message.rank, message.status, "died after its last test had passed")
            self.kill(world)
        if world.ended and world.state in ("retiring", "killed"):
            self._forget(world)

    def _server_ended(self) -> None:
        """Every rank is ending with it: worlds at work are reported dead, worlds in the making are asked for anew."""
        with self._lock:
            if self._starter is None:
                return
            worlds, lost = list(self.worlds.values()), self._starter.lost
            if not self.closing:
                self._starter, self._preload = None, False
                for world in worlds:
                    if world.state == "leased":
                        self._all_dead(world, lost)  # First: their drivers wait for it.
            kill_marked(self.directory)
            shared_memory.remove_all(self.directory)
            for world in worlds:
                if self.closing and world.state == "retiring":
                    self.complain(world, 0, -9, "may not have torn its session's fixtures down")
                if self.closing or world.state != "leased":
                    self._forget(world)
            for world in worlds:
                if not self.closing and world.state == "starting":
                    if lost:
                        self._owner.on_not_started(world, "a node of this session is lost, it does not answer any more")
                    else:
                        self._owner.on_lost(world)

    def _job_ended(self, job: MpiJob) -> None:
        """In the job's thread, with the lock."""
        world = self.worlds.get(job.world.world)
        del self._jobs[job.world.world]
        if world is None or world.state == "leased":
            return  # Its driver has been told of each rank's end.
        starting = world.state == "starting"
        self._forget(world)
        if starting:
            self._owner.on_not_started(world, f"the MPI job of the ranks has ended:\n{job.log}")

    def _all_dead(self, world: PooledWorld, lost: frozenset[int]) -> None:
        for rank in range(world.spec.ranks):
            status = MACHINE_LOST if world.spec.server_of(rank) in lost else SERVER_ENDED
            world.exits.setdefault(rank, status)
        for rank, tell in world.watchers:
            tell(world.exits[rank])
        world.watchers.clear()

    def _tick(self) -> None:
        with self._lock:
            now = monotonic()
            stuck = [world for world in self.worlds.values() if world.state == "starting"]
            overdue = [world.spec.world for world in stuck if now - world.idle_since > START_PATIENCE]
            for job in [self._jobs[number] for number in overdue if number in self._jobs]:
                job.end()
            if self._starter is not None and not self._jobs.keys() >= set(overdue):
                self._starter.kill()
            for world in self.worlds.values():
                late = now - world.retired > RETIRE_PATIENCE - _LOOK_BEFORE
                if world.state == "retiring" and late and world.stacks is None:
                    alive = {rank: pid for rank, pid in enumerate(world.pids) if rank not in world.exits}
                    world.stacks = Scouts(self.directory, world.spec).ask(Scout.stacks, alive)
            self._owner.on_tick()

    def server_log(self) -> str:
        """The end of what each fork server has written."""
        numbers = range(len(self._servers))
        return "\n".join(filter(None, (tail(paths.server_log_path(self.directory, number)) for number in numbers)))


def _nothing() -> None:
    pass
