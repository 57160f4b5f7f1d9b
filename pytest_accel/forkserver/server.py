"""The fork server: the process from which ranks are forked.

The fork server has imported torch and pytest, and has one thread and no device runtime, so that starting a rank costs
only a fork. It is the subreaper of all processes that its ranks start (prctl(2), PR_SET_CHILD_SUBREAPER). When the
controller exits, for whatever reason, the fork server kills all remaining processes. Server 0, and a server on another
machine, then removes the session's folder (`server_exit.clean_up`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import selectors
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from os import _exit, getpid

from pytest_accel.core import prctl, session_folder, shared_memory
from pytest_accel.core.clock import monotonic
from pytest_accel.core.kill import kill_descendants
from pytest_accel.core.metadata_cache import Installed
from pytest_accel.core.server_messages import ImportedAhead, KeepOut, KillWorld, Preload, StartWorld
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.forkserver.forked_worlds import ForkedWorlds
from pytest_accel.forkserver.preload import PLAIN_PRELOAD, blas_without_threads
from pytest_accel.forkserver.preloader import Preloader
from pytest_accel.forkserver.rank_fork import RankFork
from pytest_accel.forkserver.server_exit import clean_up, ending_with
from pytest_accel.forkserver.standby import StandbyProcesses
from pytest_accel.forkserver.world_sockets import WorldSockets


class _Server:
    """The loop of the fork server: waits for messages, exits, deadlines and the end of the controller."""

    def __init__(
        self, connection: Connection, spec: SessionSpec, controller: int, parent: int, always: frozenset[str]
    ) -> None:
        """`always` are the modules that every fork server imports: torch, pytest and their dependencies."""
        self.connection = connection
        self._spec = spec
        self.shared_memory = shared_memory.Watch(spec.directory, spec.server)
        # A launcher that started this process terminates its process group, so launched ranks must stay in it.
        launched = parent != controller
        installed = Installed()
        self.preloader = Preloader(spec, parent, always, installed, self._send)
        self._fork = RankFork(spec, installed, self.shared_memory, self._close, own_group=not launched)
        self._standby = StandbyProcesses(self._fork)
        # Not on other systems: there, a socket in transit may be lost when the sender closes its own copy.
        self._uses_standby = sys.platform == "linux" and not launched
        self.worlds = ForkedWorlds(spec, self._start_rank, self._send)
        # A process that a test forked in the controller may keep the connection open forever, so EOF is not enough.
        self._controller_end = prctl.end_of(controller)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def serve(self) -> None:
        """Serve requests until the controller has exited."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._preload(self._spec.preload)
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            for descriptor in (self._controller_end, self.shared_memory.descriptor):
                if descriptor is not None:
                    selector.register(descriptor, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._select_timeout())}
                if self._controller_end in ready:
                    return
                if self.shared_memory.descriptor in ready:
                    self.shared_memory.on_change()
                self.shared_memory.look_if_due(self.worlds.world_by_pid)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                self.worlds.reap(self._standby.forget)
                self.worlds.kill_overdue()
                while self.connection.poll():
                    try:
                        message = self.connection.recv()
                    except (EOFError, OSError):
                        return
                    self._handle(message)
                self._standby.add_if_due()

    def _select_timeout(self) -> float | None:
        """Return the seconds until the next deadline, or None if there is none."""
        times = [due for due in (self.worlds.due, self._standby.due, self.shared_memory.due) if due is not None]
        return max(0.0, min(times) - monotonic()) if times else None

    def _handle(self, message: object) -> None:
        if isinstance(message, StartWorld):
            started = self.worlds.start(message.spec, message.port)
            if started and self._uses_standby:
                self._standby.prepare(started)
        elif isinstance(message, KillWorld):
            if message.world in self.worlds:
                self.shared_memory.look(self.worlds.world_by_pid)
                self.worlds.kill(message.world, message.after)
        elif isinstance(message, Preload):
            self._preload(message.modules)
        elif isinstance(message, KeepOut):
            self._keep_out(message.modules)

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # The controller has exited, which serve() notices next.
            self.connection.send(message)

    def _start_rank(self, spec: WorldSpec, rank: int, sockets: WorldSockets) -> int:
        return self._standby.assign(spec, rank, sockets) or self._fork(partial(sockets.role, spec, rank))

    def _close(self) -> None:
        """Close, in a forked rank, what only the server uses."""
        self.connection.close()
        self._standby.dismiss()
        for descriptor in (self._wake_read, self._wake_write, self._controller_end, self.shared_memory.descriptor):
            if descriptor is not None:
                os.close(descriptor)

    def _preload(self, modules: Sequence[str]) -> None:
        """Import plugins and `modules`, unless there are ranks: they must stay children of the process that reaps them.

        The process that returns from this may be a fork of the one that called it.
        """
        if not self.worlds and self.preloader.needs(modules):
            self._standby.dismiss()
            self.preloader.preload(modules)

    def _keep_out(self, modules: Sequence[str]) -> None:
        """Exit, so that a new server starts, if this one imported one of `modules` without the session's import hooks.

        The process that forked this one to preload exits as well.
        """
        imported = self.preloader.imported_ahead(modules)
        if imported is not None and not self.worlds:
            self._send(ImportedAhead(imported))
            kill_descendants()
            _exit(0)


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _start_resource_tracker(directory: str) -> None:
    """Start multiprocessing's resource tracker in the folder `directory`, which only this user can write.

    The tracker has the flags of this process. Without -P, before Python 3.11, it imports modules from its folder.
    """
    before = os.getcwd()
    os.chdir(directory)
    try:
        resource_tracker.ensure_running()
    finally:
        os.chdir(before)


def main(descriptor: int, controller: int) -> None:
    """Run a fork server that is a child of `controller`; read the pickled :class:`SessionSpec` from standard input."""
    spec: SessionSpec = pickle.load(sys.stdin.buffer)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    serve(descriptor, spec, controller, controller)


def serve(descriptor: int, spec: SessionSpec, controller: int, parent: int) -> None:
    """Serve `controller` on the socket `descriptor`, and exit.

    `parent` is the parent of this process: the controller, or a launcher that has started the process for it.
    """
    connection = Connection(descriptor)
    session_folder.claim(spec.directory)
    prctl.become_subreaper()
    # The documentation of gc.freeze advises this for a process that forks. Importing torch also takes 1/7 less time.
    gc.disable()
    # All ranks share this tracker, which removes the shared memory of killed ranks when the session ends.
    _start_resource_tracker(spec.directory)
    with ending_with(parent, spec), blas_without_threads():
        _import(PLAIN_PRELOAD)
        always = frozenset(sys.modules)
        if spec.coverage is not None:
            _import(("coverage",))
    server = _Server(connection, spec, controller, parent, always)
    code = 1
    try:
        server.serve()
        server.shared_memory.look(server.worlds.world_by_pid)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        if getpid() == server.preloader.serving_pid:  # Not in a forked child that an error has led here.
            clean_up(spec)
        _exit(code)  # Finalizing an interpreter with torch takes longer than the rest of the session's shutdown.
