"""Worlds whose ranks are processes of an MPI job, for tests that use ``MPI.COMM_WORLD``.

``mpirun`` starts one fork server for each rank, and each server forks one rank. So the rank has the job's environment,
and a world starts and ends as any other. A process can initialise MPI only once, so a job serves one world. Open MPI
and MPICH give a job's processes their ranks in the environment variables of `RANK_VARIABLES`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from asyncio import Event, sleep, wait
from dataclasses import dataclass, replace
from functools import partial
from traceback import format_exc

import psutil

from pytest_accel.compat import loop_tasks
from pytest_accel.core import processes, session_folder
from pytest_accel.core.clock import START_TIMEOUT, monotonic
from pytest_accel.core.interpreter import python_command, unmeasured
from pytest_accel.core.launcher_env import of_a_rank
from pytest_accel.core.processes import KILL_TIMEOUT, MARK, kill_tree, living, mark
from pytest_accel.core.session_folder import server_log_path
from pytest_accel.core.truncation import tail
from pytest_accel.features.launch.launch_commands import mpirun
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.rendezvous import accept
from pytest_accel.features.launchers.server_group import ServerGroup
from pytest_accel.forkserver import server_process
from pytest_accel.forkserver.server_messages import RankExited, ServerReport, WorldStarted
from pytest_accel.leases.leases import HeldLease
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.rank_messages import ExitCause, RankExit
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import encode, frame
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.starter import LocalStarter, StarterReports

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""The variables of Open MPI and of Hydra, the process manager of MPICH and Intel MPI."""
_POLL_INTERVAL = 0.02
"""Seconds between two looks for processes of a job, and whether ``mpirun`` has ended."""
_END_TIMEOUT = 5.0
"""Seconds that ``mpirun`` may take to exit after its processes have."""
_MOST_SERVERS = 1_000_000
"""Maximum number of fork servers of a job. Those of world 3 have the numbers from 3,000,000 on, and those of machines
smaller numbers, even if more machines join."""


class MpiStarter(LocalStarter):
    """The starter of worlds on this machine that are MPI jobs."""

    def __init__(self, here: LocalStarter, reports: StarterReports) -> None:
        """`here` has the leases."""
        super().__init__(here.spec, here.leases, here.spawn, reports)
        self._jobs: dict[int, MpiJob] = {}
        """The jobs that run, by the number of the world."""

    def place(self, spec: WorldSpec, taken: HeldLease) -> WorldSpec:
        first = _MOST_SERVERS * spec.world
        return replace(super().place(spec, taken), servers=tuple(range(first, first + spec.ranks)))

    def start(self, spec: WorldSpec, taken: HeldLease) -> None:
        job = self._jobs[spec.world] = MpiJob(self.spec, spec, taken, self.reports)
        job.task.add_done_callback(lambda done: self._jobs.pop(spec.world))

    def kill(self, spec: WorldSpec) -> None:
        if (job := self._jobs.get(spec.world)) is not None:
            job.kill()

    def kill_servers(self, spec: WorldSpec) -> None:
        if (job := self._jobs.get(spec.world)) is not None:
            job.over.set()

    async def stop(self) -> bool:
        jobs = list(self._jobs.values())
        for job in jobs:
            job.over.set()
        for job in jobs:
            await wait([job.task])
        return all(job.cleaned_up for job in jobs)


class MpiJob:
    """The MPI job of one world."""

    def __init__(self, spec: SessionSpec, world: WorldSpec, taken: HeldLease, reports: StarterReports) -> None:
        """Start the job. Each rank has a fork server of its own. `taken` has the ranks' devices."""
        self.world = world
        self.over = Event()
        """Set when the job is to end, or its ranks or fork servers have ended."""
        self.cleaned_up = True
        """False if a fork server had to be killed, so that its descendants may live on."""
        self._spec = spec
        self._taken = taken
        self._reports = reports
        self._servers = ServerGroup(spec, self._report, self._server_ended)
        self._exited: set[int] = set()
        """The ranks that have ended."""
        self._log = server_log_path(spec.directory, world.servers[0])
        self._path = os.path.join(spec.directory, f"mpi-{world.world}.sock")
        session_folder.ensure(spec.directory)
        self._listener = unix_sockets.listen(self._path, world.ranks)
        self._process = self._start()
        self.task = loop_tasks.start(self._run())
        """Runs the job."""

    def _start(self) -> subprocess.Popen[bytes]:
        words, variables = mpirun(self.world.ranks, self._spec.directory)
        arguments = (self._path, self._spec.directory, self.world.servers[0], self._spec.plugin_options)
        source = f"from pytest_accel.features.launchers.mpi import serve; serve(*{arguments!r})"
        command = python_command(source, path=self._spec.sys_path)
        dropped = set(of_a_rank(os.environ))
        environment = {name: value for name, value in unmeasured(os.environ).items() if name not in dropped}
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                [*words, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment, **variables, MARK: mark(self._spec.directory, self.world.servers[0])},
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the ranks; a job whose ranks have not started ends at once."""
        if self._servers.running:
            self._servers.kill(self.world)
        else:
            self.over.set()

    async def _run(self) -> None:
        """Wait for the job's processes, start the world in them, and wait until the job has ended."""
        calls: dict[int, tuple[Connection, int]] = {}
        failure = None
        try:
            await self._gather(calls)
            if len(calls) == self.world.ranks and not self.over.is_set():
                spawns = {number: partial(_spawn, *calls[rank]) for rank, number in enumerate(self.world.servers)}
                self._servers.run(spawns)
                self._servers.start_ranks(self.world, lambda: self._taken.descriptors)
                await self.over.wait()
            elif not self.over.is_set():
                failure = f"mpirun has started {len(calls)} of {self.world.ranks} processes\n{tail(self._log)}"
        except Exception:  # An error, such as too many open files, fails only this world.
            failure = format_exc()
        finally:
            self._listener.close()
            for call, _ in calls.values():
                call.close()
            self.cleaned_up = await self._servers.stop()
            await self._end_mpirun()
        if failure is not None:
            self._reports.report(WorldStarted(self.world.world, problem=failure))
        for rank in range(self.world.ranks):  # The pool ignores this for ranks whose own exit was reported.
            self._reports.report(RankExited(self.world.world, rank, RankExit(ExitCause.JOB_ENDED)))

    async def _gather(self, calls: dict[int, tuple[Connection, int]]) -> None:
        """Collect the connection and process id of each rank's process, until the job ends or the time is up."""
        deadline = monotonic() + START_TIMEOUT
        while len(calls) < self.world.ranks and not self.over.is_set() and monotonic() < deadline:
            if (met := accept(self._listener, 0.0)) is not None:
                call, hello = met
                calls[hello.rank] = call, hello.pid
            elif self._process.poll() is not None:
                return
            else:
                await sleep(_POLL_INTERVAL)

    def _report(self, message: ServerReport) -> None:
        """Pass on a report of a fork server. The job ends once its ranks have ended, or could not be started."""
        if isinstance(message, RankExited):
            self._exited.add(message.rank)
        if len(self._exited) == self.world.ranks or (isinstance(message, WorldStarted) and message.problem):
            self.over.set()
        self._reports.report(message)

    def _server_ended(self, number: int, loss: str | None) -> None:
        """Kill the other fork servers: a job cannot go on after the loss of one."""
        self._servers.kill_servers(self.world)
        if not self._servers.running:
            self.over.set()

    async def _end_mpirun(self) -> None:
        """Wait until ``mpirun`` has exited, which it does after its processes; kill it after some seconds."""

        def has_exited() -> bool:
            return self._process.poll() is not None

        if not await loop_tasks.becomes_true(has_exited, _END_TIMEOUT, _POLL_INTERVAL):
            kill_tree(self._process.pid)
            await loop_tasks.becomes_true(has_exited, KILL_TIMEOUT, _POLL_INTERVAL)


@dataclass(frozen=True, slots=True)
class _MpiServer:
    """A fork server that is a child process of ``mpirun``."""

    pid: int
    loss = None
    """Always None, since the process is on this machine."""

    def kill(self) -> None:
        kill_tree(self.pid)

    def wait(self, timeout: float) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return not living([psutil.Process(self.pid)])  # It has ended even if mpirun has not reaped it.
        return True


def _spawn(call: Connection, pid: int, spec: SessionSpec) -> tuple[_MpiServer, socket.socket]:
    """Have a process of the job serve `spec` as a fork server (`Spawn`). The caller closes `call`."""
    connection = socket.socket(fileno=os.dup(call.fileno()))
    with contextlib.suppress(OSError):  # If the process has ended, the pool notices that its connection is closed.
        server_process.serve(connection, spec)
    return _MpiServer(pid), connection


def serve(path: str, directory: str, first: int, plugin_options: tuple[str, ...] | None) -> None:
    """Run a fork server for the session that listens at `path`; called in a process that ``mpirun`` has started.

    `first` is the number of the server in rank 0's process. The others are arguments of `forkserver.server.main`.
    """
    from pytest_accel.forkserver import server

    processes.die_with_parent(os.getppid())
    rank = int(next(os.environ[name] for name in RANK_VARIABLES if name in os.environ))
    call = unix_sockets.connect(path)
    call.sendall(frame(encode(Hello(rank, os.getpid()))))
    server.main(call.detach(), directory, first + rank, plugin_options)
