"""The fork server: the process from which ranks are forked.

The fork server has imported torch and pytest, and has one thread and no device runtime, so that starting a rank costs
only a fork. It is the subreaper of all processes that its ranks start (prctl(2), PR_SET_CHILD_SUBREAPER). When the
controller exits, for whatever reason, the fork server kills all remaining processes and removes the session's folder.

`multiprocessing` has a fork server too, but only one for each process. It belongs to the code under test, which may set
its preload or use it inside a rank. It also forks one process a request, and warns of every orphan that it adopts.
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
from pytest_accel.core.metadata_cache import Installed
from pytest_accel.core.paths import shared_memory_path, socket_path
from pytest_accel.core.preload_discovery import published_packages
from pytest_accel.core.rank_exit import exited
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
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.forkserver.fork_exit import disown_exit_functions, leave
from pytest_accel.forkserver.preload import PLAIN_PRELOAD, let_loggers_propagate, load_plugins, unfit
from pytest_accel.forkserver.standby import Sockets, Spares
from pytest_accel.rank import run_ahead
from pytest_accel.rank.process_group import StorePort
from pytest_accel.rank.rank_environment import HOST
from pytest_accel.rank.role import Role

_PARENT_CHECK_INTERVAL = 0.5
"""Seconds between two checks that the parent still runs, while nobody reads the connection."""
_BACKLOG = 128
"""Connections that may wait until a rank accepts them."""
_UNFIT = 3
"""Exit status of a preloading server from which ranks must not be forked."""


@dataclass(slots=True)
class _Running:
    """The ranks of a world that the fork server has not yet reaped."""

    pids: dict[int, int] = field(default_factory=dict)
    """Rank by process id."""
    deadline: float | None = None
    """Time at which the ranks are killed (`clock.monotonic`); None: they are not."""


class _Server:
    def __init__(
        self, connection: Connection, spec: SessionSpec, controller: int, parent: int, always: frozenset[str]
    ) -> None:
        """`always` are the modules that every fork server imports: torch, pytest and their dependencies."""
        self.connection = connection
        self.parent = parent
        self.pid = getpid()
        """Process id of the serving process. Only this process cleans up the session, not a fork that escapes."""
        self.launched = parent != controller
        """True if a launcher started this process and terminates it."""
        self.spec = spec
        self.worlds: dict[int, _Running] = {}
        self.preloading = False
        self._always = always
        self._installed = Installed()
        self._plugins_loaded = False
        self._spares = Spares(self._fork)
        self.shared_memory = shared_memory.Watch(spec.directory, spec.server)
        # A process that a test forked in the controller may keep the connection open forever, so EOF is not enough.
        self._controller_end = prctl.end_of(controller)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def catch_signals(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serve requests until the controller has exited."""
        self.catch_signals()
        self._preload(())
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
                    self._handle(message)
                self._spares.add_if_due()

    @property
    def ranks(self) -> dict[int, int]:
        """The world of each rank, by the rank's process id."""
        return {pid: number for number, world in self.worlds.items() for pid in world.pids}

    def _select_timeout(self) -> float | None:
        """Return the seconds until the next deadline, or None if there is none."""
        deadlines = [world.deadline for world in self.worlds.values() if world.deadline is not None]
        deadlines += [due for due in (self._spares.due, self.shared_memory.due) if due is not None]
        return max(0.0, min(deadlines) - monotonic()) if deadlines else None

    def _handle(self, message: object) -> None:
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

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # The controller has exited; serve() is about to notice.
            self.connection.send(message)

    def _start(self, spec: WorldSpec, port: int | None) -> None:
        running = self.worlds[spec.world] = _Running()
        listeners: dict[int, socket.socket] = {}
        pairs: list[tuple[socket.socket, socket.socket]] = []
        store = None
        try:
            if spec.local:
                pairs = run_ahead.receive(self.connection, spec.ranks) if spec.parted else run_ahead.connect(spec.ranks)
            for rank in (rank for rank in range(spec.ranks) if spec.server_of(rank) == self.spec.server):
                listeners[rank] = unix_sockets.listen(socket_path(self.spec.directory, spec.world, rank), _BACKLOG)
            if spec.grouped and port is None:
                store = reserve_port(spec.addresses[0] if spec.addresses else HOST)
                port = store.getsockname()[1]
            sockets = Sockets(listeners, pairs, None if port is None else StorePort(port, store))
            for rank in listeners:
                pid = self._spares.give(spec, rank, sockets) or self._fork(partial(sockets.role, spec, rank))
                running.pids[pid] = rank
        except OSError:
            running.deadline = monotonic()
            self._kill_overdue()
            self._send(StartFailed(spec.world, traceback.format_exc()))
        else:
            self._send(WorldStarted(spec.world, tuple(running.pids), port))
            # Not on other systems: there, a socket in transit may be lost when the sender closes its own copy.
            if sys.platform == "linux" and not self.launched:
                self._spares.stock_up(len(listeners))
        finally:
            for held in (*listeners.values(), *chain.from_iterable(pairs), *([store] if store else [])):
                held.close()

    def _fork(self, wait_for_role: Callable[[], Role]) -> int:
        # Imported modules live as long as the ranks. Freezing keeps the ranks' garbage collections from walking through
        # them and copying their pages (pytest alone collects five times when a session ends).
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
            finally:  # Also if print_exc() raises: the child must not go on in the server's code.
                leave(code)
        return pid

    def _become_child(self) -> None:
        gc.enable()
        disown_exit_functions()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self.launched:  # A launcher terminates its process group, so launched ranks must stay in it.
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
                self._send(RankExited(number, rank, exited(os.waitstatus_to_exitcode(status))))
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
        """Exit, so that a new server starts, if this one imported one of `modules` without the session's import hooks.

        The process that forked this one to preload exits as well.
        """
        for name in modules:
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec is not None and name not in self._always and loads_plainly(spec) and not self.worlds:
                self._send(ImportedAhead(name))
                kill_descendants()
                os._exit(0)

    def _preload(self, modules: Sequence[str]) -> None:
        """Import `modules` in a fork of this process, which then serves in its place if it may still be forked.

        If the imports start threads or a device runtime, the fork exits and this process continues to serve.
        """
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
            # The fork served until the controller exited, or it died together with its ranks. In the second case the
            # exit of this process makes the controller start a server that does not preload.
            kill_descendants()
            shared_memory.remove(shared_memory_path(self.spec.directory, self.spec.server))
            _exit(0)

    def _import_or_leave(self, modules: Sequence[str]) -> None:
        if not self._plugins_loaded:
            self._plugins_loaded = True
            named = self.spec.plugins
            kept_out = [name for name in named if name.startswith("no:")]
            with self._installed.remembered():
                published_packages()  # Fills a cache for the ranks, which look up the plugins of installed packages.
                self._try("pytest's plugins", lambda: load_plugins(self.spec.directory, kept_out))
                if len(named) > len(kept_out):
                    self._try("the plugins that -p names", lambda: load_plugins(self.spec.directory, named))
        for name in modules:
            self._try(name, partial(importlib.import_module, name))

    def _try(self, name: str, load: Callable[[], object]) -> None:
        try:
            load()
        except BaseException as error:
            # Not an error here: a rank that needs the module reports the same error itself.
            self._send(ServerNote(f"preload: {name} could not be imported ({type(error).__name__}: {error})"))
        if (reason := unfit()) is not None:
            self._send(ServerNote(f"preload: ranks start without what is preloaded, since importing {name} {reason}"))
            _exit(_UNFIT)


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def reserve_port(address: str) -> socket.socket:
    """Return a listening socket on a free port of `address`.

    The world keeps the socket until it ends, so that no other process can take the port.
    """
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
    """Exit with all descendants when `parent` exits, in a block in which nobody reads the connection.

    A timer compares the parent process id. PR_SET_PDEATHSIG would not do: its "parent" is the thread that started this
    process (prctl(2)).
    """

    def check_parent(number: int, frame: object) -> None:
        if os.getppid() != parent:
            clean_up(spec)
            _exit(1)

    before = signal.signal(signal.SIGALRM, check_parent)
    signal.setitimer(signal.ITIMER_REAL, _PARENT_CHECK_INTERVAL, _PARENT_CHECK_INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def clean_up(spec: SessionSpec) -> None:
    """Kill all descendants and remove the session's files in shared memory.

    Remove the session's folder too, except in a server that shares it with the driver's own server, number 0.
    """
    kill_descendants()
    shared_memory.remove(shared_memory_path(spec.directory, spec.server))
    if spec.server == 0 or spec.remote:
        shutil.rmtree(spec.directory, ignore_errors=True)


def main(descriptor: int, controller: int) -> None:
    """Serve `controller` on the socket `descriptor`. Read the pickled :class:`SessionSpec` from standard input."""
    spec: SessionSpec = pickle.load(sys.stdin.buffer)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    work(descriptor, spec, controller, controller)


def work(descriptor: int, spec: SessionSpec, controller: int, parent: int) -> None:
    """Serve `controller` on the socket `descriptor`. `parent` is this process's parent, perhaps not the controller."""
    connection = Connection(descriptor)
    prctl.become_subreaper()
    # The documentation of gc.freeze advises this for a process that forks. Importing torch also takes 1/7 less time.
    gc.disable()
    # All ranks share this tracker, which removes the shared memory of killed ranks when the session ends.
    resource_tracker.ensure_running()
    # OpenBLAS starts threads when it is loaded, and a process with threads must not be forked.
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
        _exit(code)  # Finalizing an interpreter with torch takes longer than the rest of the session's shutdown.
