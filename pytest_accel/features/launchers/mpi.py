"""Worlds whose ranks are processes of an MPI job, for tests that use ``MPI.COMM_WORLD``.

``mpirun`` starts one fork server for each rank, and each server forks one rank. So the rank has the job's environment,
and a world starts and ends as any other. A process can initialise MPI only once, so a job serves one world. Open MPI
and MPICH give a job's processes their ranks in the environment variables of `RANK_VARIABLES`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import format_exc
from typing import Any

import psutil
from msgspec import Struct, structs

from pytest_accel.core import prctl, session_folder, threads
from pytest_accel.core.clock import monotonic
from pytest_accel.core.interpreter import python_command, unmeasured
from pytest_accel.core.kill import KILL_TIMEOUT, MARK, kill_tree, mark
from pytest_accel.core.launcher_env import of_a_rank
from pytest_accel.core.paths import server_log_path
from pytest_accel.core.timeouts import START_TIMEOUT
from pytest_accel.core.truncation import tail
from pytest_accel.features.launch.launch_commands import mpirun
from pytest_accel.features.launchers.local_rendezvous import accept
from pytest_accel.forkserver.server_client import ForkServerGroup, ServerCallbacks
from pytest_accel.forkserver.server_messages import (
    FirstStep,
    KillWorld,
    RankExited,
    Serve,
    StartFailed,
    StartWorld,
    file_with,
)
from pytest_accel.forkserver.server_process import first_step
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.rank_exit import ExitCause, RankExit
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import encode, frame
from pytest_accel.messages.world_spec import WorldSpec

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""The variable of Open MPI, and the one of Hydra, the process manager of MPICH and Intel MPI."""
_POLL_INTERVAL = 0.1
"""Seconds between two checks whether ``mpirun`` has ended while its processes are awaited."""
_END_TIMEOUT = 5.0
"""Seconds that ``mpirun`` may take to exit after its processes have."""


class MpiProcess(Struct, frozen=True):
    """The only message of a process of the job. The answer is a socket, and a file with the `Serve` for its server."""

    rank: int
    pid: int


class MpiJob:
    """The MPI job of one world, with the interface of a :class:`ForkServerClient`."""

    def __init__(
        self,
        spec: SessionSpec,
        callbacks: ServerCallbacks,
        lock: threading.RLock,
        launcher: str,
        world: WorldSpec,
        on_job_end: Callable[[], None],
    ) -> None:
        """Start `world` with `launcher`, which is ``mpirun``. Each rank has a fork server of its own.

        `on_job_end` is called once all processes of the job have exited. The callbacks `on_end` and `on_tick` are not
        called. All callbacks except for `on_failure` are called with `lock` held.
        """
        self._world = world
        self._spec = spec
        self._lock = lock
        self._callbacks = callbacks
        self._on_job_end = on_job_end
        self._servers: ForkServerGroup | None = None
        self._exited: set[int] = set()
        self._cleaned_up = True
        """False if a fork server had to be killed, so that its descendants may live on."""
        """The ranks whose exit was reported."""
        self._over = threading.Event()
        """Set when the job is to end, or its fork servers have ended."""
        self._log = server_log_path(spec.directory, world.servers[0])
        self._path = os.path.join(spec.directory, f"mpi-{world.world}.sock")
        session_folder.ensure(spec.directory)
        self._listener = unix_sockets.listen(self._path, world.ranks)
        self._process = self._start()
        self._thread = threads.start(self._run, f"accel-mpi-{world.world}")

    def _start(self) -> subprocess.Popen[bytes]:
        words, variables = mpirun(self._world.ranks, self._spec.directory)
        first = first_step(structs.replace(self._spec, server=self._world.servers[0]))
        source = f"from pytest_accel.features.launchers.mpi import serve; serve({self._path!r}, {tuple(first)!r})"
        command = python_command(source, path=self._spec.sys_path)
        dropped = set(of_a_rank(os.environ))
        environment = {name: value for name, value in unmeasured(os.environ).items() if name not in dropped}
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                [*words, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment, **variables, MARK: mark(self._spec.directory, self._world.servers[0])},
                start_new_session=True,
            )

    def send(self, message: object) -> None:
        """Send `message` to the fork servers; no-op if the job has ended, which `on_job_end` reports."""
        if self._servers is not None:
            self._servers.send(message)
        elif isinstance(message, KillWorld):
            self.kill()

    def kill(self) -> None:
        """Terminate the job; `on_job_end` follows."""
        self._over.set()
        if self._servers is None and self._process.poll() is None:
            kill_tree(self._process.pid)

    def stop(self) -> bool:
        """Terminate the job, and wait until it has ended; return False if some of its processes may live on.

        The caller must not hold the lock.
        """
        with self._lock:
            self.kill()
        return threads.end(self._thread) and self._cleaned_up

    # The job's thread

    def _run(self) -> None:
        try:
            self._run_job()
        except BaseException:
            self._callbacks.on_failure(f"the thread that runs an MPI job has ended with an error:\n{format_exc()}")

    def _run_job(self) -> None:
        """Wait for the job's processes, connect their fork servers, and wait until the job has ended."""
        calls = self._gather()
        with self._lock:
            if len(calls) == self._world.ranks and not self._over.is_set():
                self._serve(calls)
        if self._servers is not None:
            self._over.wait()
            self._cleaned_up = self._servers.stop()
            self._report_ended()
        else:
            kill_tree(self._process.pid)
        for call, _ in calls.values():  # A fork server that still imports ends with its connection.
            call.close()
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            kill_tree(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_TIMEOUT)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        with self._lock:
            if self._servers is None and not self._over.is_set():
                why = f"mpirun has started {len(calls)} of {self._world.ranks} processes\n{tail(self._log)}"
                self._callbacks.on_message(StartFailed(self._world.world, why))
            self._on_job_end()

    def _gather(self) -> dict[int, tuple[socket.socket, int]]:
        """Return the connection and process id of each rank's process; fewer if the job ends or the time is up."""
        calls: dict[int, tuple[socket.socket, int]] = {}
        deadline = monotonic() + START_TIMEOUT
        ranks = self._world.ranks
        with self._listener:
            while len(calls) < ranks and self._process.poll() is None and monotonic() < deadline:
                met = accept(self._listener, MpiProcess, _POLL_INTERVAL)
                if met is not None:
                    call, process = met
                    calls[process.rank] = call, process.pid
        return calls

    def _serve(self, calls: dict[int, tuple[socket.socket, int]]) -> None:
        """Run the fork servers in the job's processes, and start the world; an error fails only this world."""
        spawns = [partial(_hand_over, *calls[rank]) for rank in range(self._world.ranks)]
        callbacks = ServerCallbacks(self._forward, self._server_ended, lambda: None, self._callbacks.on_failure)
        self._servers = ForkServerGroup(callbacks, self._lock)
        try:
            self._servers.run(self._spec, dict(zip(self._world.servers, spawns, strict=True)))
            self._servers.send(StartWorld(self._world))
        except Exception:  # For example too many open files.
            self._over.set()
            self._callbacks.on_message(StartFailed(self._world.world, format_exc()))

    def _server_ended(self, number: int, loss: str | None) -> None:
        """Kill the other fork servers, without which a job cannot go on; called in a thread of the server."""
        assert self._servers is not None
        self._servers.kill()
        if not self._servers.running:
            self._over.set()

    def _report_ended(self) -> None:
        """Report the ranks as ended with the job, except those whose own exit was reported."""
        with self._lock:
            for rank in range(self._world.ranks):
                if rank not in self._exited:
                    self._callbacks.on_message(RankExited(self._world.world, rank, RankExit(ExitCause.JOB_ENDED)))

    def _forward(self, message: object) -> None:
        """Pass on a message of the fork servers, and record which ranks have exited."""
        if isinstance(message, RankExited):
            self._exited.add(message.rank)
        self._callbacks.on_message(message)


@dataclass(frozen=True, slots=True)
class _MpiServer:
    """A fork server that is a child process of ``mpirun``."""

    pid: int
    loss = None
    """Always None, since the process is on this machine."""

    def kill(self) -> None:
        kill_tree(self.pid)

    def wait(self, timeout: float) -> bool:
        end = prctl.end_of(self.pid)
        if end is not None:  # The descriptor is readable once the process has ended, even before mpirun has reaped it.
            try:
                return bool(select.select([end], [], [], timeout)[0])
            finally:
                os.close(end)
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                psutil.Process(self.pid).wait(timeout)
            except psutil.TimeoutExpired:
                return False
        return True


def _hand_over(call: socket.socket, pid: int, spec: SessionSpec, end: socket.socket) -> _MpiServer:
    """Pass a process of the job its end of the connection to the pool; return the process as a fork server."""
    begin = Serve(spec, os.getpid())
    # If the process has ended, the pool notices that its connection is closed.
    with contextlib.suppress(OSError), file_with(begin, spec.directory) as given:
        socket.send_fds(call, [b"\0"], [end.fileno(), given.fileno()])
    return _MpiServer(pid)


def serve(path: str, step_one: Sequence[Any]) -> None:
    """Run a fork server for the session that listens at `path`; called in a process that ``mpirun`` has started.

    `step_one` is the :class:`FirstStep` of rank 0's process.
    """
    from pytest_accel.forkserver import server

    prctl.die_with_parent(os.getppid())
    rank = int(next(os.environ[name] for name in RANK_VARIABLES if name in os.environ))
    call = unix_sockets.connect(path)
    call.sendall(frame(encode(MpiProcess(rank, os.getpid()))))
    first = FirstStep(*step_one)
    server.main(call.detach(), first._replace(server=first.server + rank))
