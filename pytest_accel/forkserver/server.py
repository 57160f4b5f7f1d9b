"""The process that ranks are forked from.

It has torch and pytest imported, one thread and no device runtime, so that a rank costs a fork. It is the subreaper of
everything that its ranks start (prctl(2), PR_SET_CHILD_SUBREAPER), and when the controller goes away, however it goes,
it kills what is left and removes the session's folder.

`multiprocessing`'s own fork server is one a process and belongs to the code under test, which may set its preload or
use it inside a rank; it also forks one process a request and warns of every orphan that it adopts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from os import _exit, getpid

from pytest_accel.core import prctl, shared_memory, unix_sockets
from pytest_accel.core.clock import monotonic
from pytest_accel.core.kill import kill_descendants, kill_group, kill_tree
from pytest_accel.core.loaders import loads_plainly
from pytest_accel.core.messages import (
    ImportedAhead,
    KeepOut,
    KillWorld,
    Preload,
    RankExited,
    ServerNote,
    SessionSpec,
    StartFailed,
    StartWorld,
    WorldSpec,
    WorldStarted,
)
from pytest_accel.core.metadata_cache import Installed
from pytest_accel.core.paths import shared_memory_path, socket_path
from pytest_accel.core.preload_discovery import published_packages
from pytest_accel.forkserver.fork_exit import disown_exit_functions, leave
from pytest_accel.forkserver.preload import PLAIN_PRELOAD, let_loggers_propagate, load_plugins, unfit
from pytest_accel.forkserver.standby import Sockets, Spares
from pytest_accel.rank import run_ahead
from pytest_accel.rank.process_group import Meeting
from pytest_accel.rank.rank_environment import HOST
from pytest_accel.rank.role import Role

_LOOK = 0.5
"""Seconds between two looks at whether the controller is still there, while it cannot be heard."""
_CALLS = 128
"""Connections that may wait until a rank accepts them."""
_UNFIT = 3
"""Exit status by which a preloading server says that ranks must not be forked from it."""


@dataclass(slots=True)
class _Running:
    """The ranks of a world that have not been reaped."""

    pids: dict[int, int] = field(default_factory=dict)
    """Rank by process id."""
    deadline: float | None = None


class _Server:
    def __init__(
        self, connection: Connection, spec: SessionSpec, controller: int, parent: int, always: frozenset[str]
    ) -> None:
        """`always` are the modules that every fork server imports: torch, pytest, and what these import."""
        self.connection = connection
        self.parent = parent
        self.pid = getpid()
        """The process that serves, which the session's end is for: a copy of it that goes astray is none."""
        self.launched = parent != controller
        """Whether a launcher has started this process, and ends it."""
        self.spec = spec
        self.worlds: dict[int, _Running] = {}
        self.preloading = False
        self._always = always
        self._installed = Installed()
        self._plugins_loaded = False
        self._spares = Spares(self._fork)
        self.shared_memory = shared_memory.Watch(spec.directory, spec.server)
        # What a test forked in the controller may hold the connection open for ever.
        self._controller_end = prctl.end_of(controller)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def catch_signals(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the controller is gone."""
        self.catch_signals()
        self._preload(())
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            for descriptor in (self._controller_end, self.shared_memory.descriptor):
                if descriptor is not None:
                    selector.register(descriptor, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._patience())}
                if self._controller_end in ready:
                    return
                if self.shared_memory.descriptor in ready:
                    self.shared_memory.on_change()
                self.shared_memory.look_if_due(self.ranks)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                self._reap()
                self._kill_overdue()
                while self.connection.poll():
                    try:
                        message = self.connection.recv()
                    except (EOFError, OSError):
                        return
                    self._obey(message)
                self._spares.add_if_due()

    @property
    def ranks(self) -> dict[int, int]:
        """The world of each rank, by its process id."""
        return {pid: number for number, world in self.worlds.items() for pid in world.pids}

    def _patience(self) -> float | None:
        deadlines = [world.deadline for world in self.worlds.values() if world.deadline is not None]
        deadlines += [due for due in (self._spares.due, self.shared_memory.due) if due is not None]
        return max(0.0, min(deadlines) - monotonic()) if deadlines else None

    def _obey(self, message: object) -> None:
        if isinstance(message, StartWorld):
            self._start(message.spec, message.port)
        elif isinstance(message, KillWorld):
            world = self.worlds.get(message.world)
            if world is not None:
                self.shared_memory.look(self.ranks)
                world.deadline = monotonic() + message.after
                self._kill_overdue()
        elif isinstance(message, Preload):
            self._preload(message.modules)
        elif isinstance(message, KeepOut):
            self._keep_out(message.modules)

    def _say(self, message: object) -> None:
        with contextlib.suppress(OSError):  # The controller is gone; serve() is about to notice.
            self.connection.send(message)

    def _start(self, spec: WorldSpec, port: int | None) -> None:
        running = self.worlds[spec.world] = _Running()
        listeners: dict[int, socket.socket] = {}
        pairs: list[tuple[socket.socket, socket.socket]] = []
        store = None
        try:
            if spec.near:
                pairs = run_ahead.receive(self.connection, spec.ranks) if spec.parted else run_ahead.connect(spec.ranks)
            for rank in (rank for rank in range(spec.ranks) if spec.server_of(rank) == self.spec.server):
                listeners[rank] = unix_sockets.listen(socket_path(self.spec.directory, spec.world, rank), _CALLS)
            if spec.grouped and port is None:
                store = reserve_port(spec.addresses[0] if spec.addresses else HOST)
                port = store.getsockname()[1]
            sockets = Sockets(listeners, pairs, None if port is None else Meeting(port, store))
            for rank in listeners:
                pid = self._spares.give(spec, rank, sockets) or self._fork(partial(sockets.role, spec, rank))
                running.pids[pid] = rank
        except OSError:
            running.deadline = monotonic()
            self._kill_overdue()
            self._say(StartFailed(spec.world, traceback.format_exc()))
        else:
            self._say(WorldStarted(spec.world, tuple(running.pids), port))
            # Elsewhere than on Linux, sockets that nobody has received yet may be lost with the sender's own.
            if sys.platform == "linux" and not self.launched:
                self._spares.stock_up(len(listeners))
        finally:
            for held in (*listeners.values(), *chain.from_iterable(pairs), *([store] if store else [])):
                held.close()

    def _fork(self, wait_for_role: Callable[[], Role]) -> int:
        # What is imported here lives as long as the ranks: their collections need not walk through it, nor touch its
        # pages (pytest alone collects five times when a session ends).
        gc.freeze()
        let_loggers_propagate("torch")
        server = os.getpid()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                prctl.die_with_parent(server)
                self._become_child()
                from pytest_accel.rank import main as rank_module

                code = rank_module.run(self.spec, wait_for_role, self._installed, self.shared_memory)
            except BaseException:
                traceback.print_exc()
            finally:  # Also where there is no stream to print on: the server's code is not for this process.
                leave(code)
        return pid

    def _become_child(self) -> None:
        gc.enable()
        disown_exit_functions()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self.launched:  # Else a rank is to end when the launcher ends the process group that it has made.
            os.setsid()
        self.connection.close()
        self._spares.dismiss()
        held = (self._wake_read, self._wake_write, self._controller_end, self.shared_memory.descriptor)
        for descriptor in held:
            if descriptor is not None:
                os.close(descriptor)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._spares.forget(pid)
            for number, world in list(self.worlds.items()):
                if pid not in world.pids:
                    continue
                rank = world.pids.pop(pid)
                kill_group(pid)
                self._say(RankExited(number, rank, os.waitstatus_to_exitcode(status)))
                if not world.pids:
                    del self.worlds[number]
                    shared_memory.remove(shared_memory_path(self.spec.directory, self.spec.server), self.worlds)

    def _kill_overdue(self) -> None:
        now = monotonic()
        for world in self.worlds.values():
            if world.deadline is not None and world.deadline <= now:
                world.deadline = None
                for pid in world.pids:
                    kill_tree(pid)

    def _keep_out(self, modules: Sequence[str]) -> None:
        """End this process, and its original, if one of `modules` has been imported as the session does not."""
        for name in modules:
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec is not None and name not in self._always and loads_plainly(spec) and not self.worlds:
                self._say(ImportedAhead(name))
                kill_descendants()
                os._exit(0)

    def _preload(self, modules: Sequence[str]) -> None:
        """Import `modules` in a copy of this process, which then serves in its place if it is still fit to fork."""
        if self.worlds:
            return  # The ranks must stay the children of the process that reaps them.
        if self.spec.bare:
            return
        wanted = [name for name in modules if name not in sys.modules]
        if self._plugins_loaded and not wanted:
            return
        self._spares.dismiss()
        if self.preloading:
            self._import_or_leave(wanted)
            return
        original = os.getpid()
        copy = os.fork()
        if copy == 0:
            prctl.die_with_parent(original)
            prctl.become_subreaper()
            self.preloading, self.pid = True, getpid()
            self._import_or_leave(wanted)
            return
        with ending_with(self.parent, self.spec):
            status = _wait_for(copy)
        if status != _UNFIT:
            # The copy served until the controller went away, or it died and its ranks with it: the controller
            # learns of that by the end of this process, and starts a server that does not preload.
            kill_descendants()
            shared_memory.remove(shared_memory_path(self.spec.directory, self.spec.server))
            _exit(0)

    def _import_or_leave(self, modules: Sequence[str]) -> None:
        if not self._plugins_loaded:
            self._plugins_loaded = True
            named = self.spec.plugins
            kept_out = [name for name in named if name.startswith("no:")]
            with self._installed.remembered():
                published_packages()  # Cached: ranks ask which modules are plugins of others.
                self._try("pytest's plugins", lambda: load_plugins(self.spec.directory, kept_out))
                if len(named) > len(kept_out):
                    self._try("the plugins that -p names", lambda: load_plugins(self.spec.directory, named))
        for name in modules:
            self._try(name, partial(importlib.import_module, name))

    def _try(self, name: str, load: Callable[[], object]) -> None:
        try:
            load()
        except BaseException as error:
            # Not ours to judge: a rank that needs it will fail with the same error, in its own name.
            self._say(ServerNote(f"preload: {name} could not be imported ({type(error).__name__}: {error})"))
        if (reason := unfit()) is not None:
            self._say(ServerNote(f"preload: ranks start without what is preloaded, since importing {name} {reason}"))
            _exit(_UNFIT)


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def reserve_port(address: str) -> socket.socket:
    """A listening socket on a free port of `address`: held from now until the world ends, so nothing can take it."""
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    held.bind((address, 0))
    held.listen(1024)
    return held


def _wait_for(pid: int) -> int:
    while True:
        found, status = os.waitpid(-1, 0)
        if found == pid:
            return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def ending_with(parent: int, spec: SessionSpec) -> Iterator[None]:
    """End this process and all that came from it when `parent` has ended, although nobody reads the connection.

    A process is not told that its parent ends where that is one of several threads of it (prctl(2)).
    """

    def look(number: int, frame: object) -> None:
        if os.getppid() != parent:
            clean_up(spec)
            _exit(1)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def clean_up(spec: SessionSpec) -> None:
    """Leave nothing of the session behind; the folder is for the driver's own server to remove, who reads in it."""
    kill_descendants()
    shared_memory.remove(shared_memory_path(spec.directory, spec.server))
    if spec.server == 0 or spec.far:
        shutil.rmtree(spec.directory, ignore_errors=True)


def main(descriptor: int, controller: int) -> None:
    """Serve `controller` on the socket `descriptor`; the :class:`SessionSpec` is in the file that is standard input."""
    spec: SessionSpec = pickle.load(sys.stdin.buffer)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    work(descriptor, spec, controller, controller)


def work(descriptor: int, spec: SessionSpec, controller: int, parent: int) -> None:
    """Serve `controller` on the socket `descriptor`. `parent` is this process's, which need not be the controller."""
    connection = Connection(descriptor)
    prctl.become_subreaper()
    # As gc.freeze's documentation advises for a process that others are forked from. Importing torch takes a seventh
    # less time, too.
    gc.disable()
    # Shared by all ranks: what a killed rank leaves in shared memory is then removed when the session ends.
    resource_tracker.ensure_running()
    # OpenBLAS starts its threads when it is loaded, and a process with threads must not be forked.
    given = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with ending_with(parent, spec):
        _import(PLAIN_PRELOAD)
        always = frozenset(sys.modules)
        if not spec.bare:
            _import(spec.preload)
        if spec.coverage is not None:
            _import(("coverage",))
    if given is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    server = _Server(connection, spec, controller, parent, always)
    code = 1
    try:
        server.serve()
        server.shared_memory.look(server.ranks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        if getpid() == server.pid:
            clean_up(spec)
        _exit(code)  # Taking the interpreter apart, torch in it, takes longer than the rest of the session's end.
