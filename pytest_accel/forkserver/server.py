"""The process of the fork server, which serves the pool until the controller exits.

The fork server starts in two steps: it imports torch, pytest and its plugins, and then gets the session's settings
(:func:`main`). It has one thread and no device runtime, so that starting a rank costs only a fork. It is the subreaper
of all processes that its ranks start (prctl(2), PR_SET_CHILD_SUBREAPER). When the controller exits, for whatever
reason, the fork server kills all remaining processes. Server 0, and a server on another machine, then removes the
session's folder.
"""

from __future__ import annotations

import gc
import importlib.machinery
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from os import _exit, execve, getpid
from typing import NoReturn

import pytest

from pytest_accel.core import log, processes, session_folder
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.log import step
from pytest_accel.core.plugin_roles import published_plugins
from pytest_accel.core.processes import children_of, cleans_up, kill_descendants, kill_group, kill_tree
from pytest_accel.core.session_folder import rank_path
from pytest_accel.forkserver.preload import (
    TORCH_MODULES,
    blas_without_threads,
    import_installed,
    import_named,
    load_plugins,
    thread_count,
    unfit,
)
from pytest_accel.forkserver.rank_process import fork_rank
from pytest_accel.forkserver.server_messages import (
    KillWorld,
    RankExited,
    Serve,
    ServerNotice,
    ServerReport,
    ServerRequest,
    StartWorld,
    WorldStarted,
    file_with,
    read_file,
)
from pytest_accel.hardware.kernel_files import oom_kills
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.rank_messages import RETIRED, ExitCause, RankExit, exited
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.messages.world_spec import LOOPBACK, Role, WorldSpec, host_of, loopback_interface

_NO_PLUGINS = ("--disable-plugin-autoload",)
"""The options with which pytest loads no installed plugin."""


def main(
    connection: int, directory: str, server: int, plugin_options: tuple[str, ...] | None, given: int | None = None
) -> NoReturn:
    """Import what ranks need, then serve the session in the folder `directory` as the server number `server`, and exit.

    `plugin_options` are those of the :class:`SessionSpec`; if they are None, torch is not imported either. An unnamed
    file with the :class:`Serve` arrives on the socket `connection`, on which the server then serves. If the process has
    received it and then replaced itself, it is `given`.
    """
    os.set_inheritable(connection, False)  # A program that an import starts must not keep it open.
    pool = Connection(connection)
    parent, path = os.getppid(), tuple(sys.path)
    session_folder.claim(directory)
    log.start(f"fork server {server}")
    step("starts; its parent is process %d", parent)
    processes.become_subreaper()
    # The documentation of gc.freeze advises this for a process that forks. Importing torch also takes 1/7 less time.
    gc.disable()
    with blas_without_threads():
        problem = _import_ahead(directory, plugin_options)
    if problem is not None and plugin_options != _NO_PLUGINS:
        # A plugin that starts a thread must not keep a suite from running, and nobody has asked to import it here.
        step("starts again, without pytest's plugins: their import %s", problem)
        _start_anew(path, connection, given, directory, server, _NO_PLUGINS)
    if given is None:
        given = _receive(pool, parent)
        if given is None:
            step("its parent has exited, or does not need it")
            _clean_up(directory if server == 0 else None)
            _exit(0)
    begin = read_file(given, Serve)
    spec = begin.spec
    if begin.environment is not None:
        os.environ.update(begin.environment)
        for name in os.environ.keys() - begin.environment.keys():
            del os.environ[name]
        log.start(f"fork server {server}")
    if _has_other_modules([entry for entry in spec.sys_path if entry not in path]):
        step("starts again: the suite's folders have other modules than those that it has imported")
        with file_with(begin, directory) as file:
            _start_anew(spec.sys_path, connection, file.fileno(), directory, server, plugin_options)
    sys.path[:] = spec.sys_path
    _serve(pool, begin, parent)


def _serve(connection: Connection, begin: Serve, parent: int) -> NoReturn:
    """Serve the session of `begin`, and exit."""
    # All ranks share this tracker, which removes the shared memory of killed ranks when the session ends.
    _start_resource_tracker(begin.spec.directory)
    error = None
    with blas_without_threads():
        if begin.spec.preload is not None:
            error = import_named(begin.spec.preload)
        if begin.spec.coverage is not None:
            import_installed(("coverage",))
    step("has imported what ranks need" if error is None else "cannot import what accel_preload names")
    pid = getpid()
    code = 1
    try:
        if error is not None:
            send(connection, ServerNotice(error=error))
        else:
            ForkedWorlds(connection, begin, launched=parent != begin.controller).serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        if getpid() == pid:  # A forked child with an error also comes here.
            step("ends with status %d", code)
            if left := _clean_up(begin.spec.own_folder):
                send(connection, ServerNotice(survivors=left))
        _exit(code)  # Finalizing an interpreter with torch takes longer than the rest of the session's shutdown.


def _receive(connection: Connection, parent: int) -> int | None:
    """Return the descriptor that arrives on `connection`; None if this is closed, or `parent` exits."""
    end = processes.end_of(parent)  # As in `ForkedWorlds`, EOF is not enough.
    try:
        if connection in wait([connection, *([] if end is None else [end])]):
            with suppress(EOFError):
                return unix_sockets.receive_descriptors(connection, 1)[0]
    finally:
        if end is not None:
            os.close(end)
    return None


def _import_ahead(directory: str, plugin_options: Sequence[str] | None) -> str | None:
    """Import what all ranks need; return why they must not be forked after the import of pytest's plugins, or None."""
    published_plugins()  # Fills a cache for the ranks, which look up the plugins of installed packages.
    if plugin_options is None:
        return None
    import_installed(TORCH_MODULES)
    known, threads = frozenset(sys.modules), thread_count()  # A debugger may have threads in this process.
    try:
        load_plugins(directory, plugin_options)
    except BaseException:
        traceback.print_exc()  # Not an error here: a rank that needs the plugin reports the same error itself.
    return unfit(known, threads)


def _has_other_modules(path: Sequence[str]) -> bool:
    """Return whether the folders `path` have modules that replace modules which this process has imported."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if "." not in name and spec is not None and spec.has_location:
            found = importlib.machinery.PathFinder.find_spec(name, path)
            if found is not None and found.origin != spec.origin:
                return True
    return False


def _start_anew(path: Sequence[str], connection: int, given: int | None, *others: object) -> NoReturn:
    """Replace this process by a fork server that has not imported anything yet; its `main` gets these arguments."""
    for descriptor in (connection, given):
        if descriptor is not None:
            os.set_inheritable(descriptor, True)
    source = f"from {__name__} import main; main({connection}, *{others!r}, {given})"
    command = python_command(source, path=path)
    execve(command[0], command, os.environ)


def _start_resource_tracker(directory: str) -> None:
    """Start multiprocessing's resource tracker in the folder `directory`, which only this user can write.

    The tracker has the flags of this process. Without -P, before Python 3.11, it imports modules from its folder.
    """
    with pytest.MonkeyPatch.context() as changed:
        changed.chdir(directory)
        resource_tracker.ensure_running()


def _clean_up(folder: str | None) -> tuple[str, ...]:
    """Kill all descendants, and remove the session's `folder` if it is given; return the processes that live on."""
    left = kill_descendants()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return left


_BACKLOG = 128
"""Connections that may wait until a rank accepts them."""


class ForkedWorlds:
    """The worlds that have ranks forked from this server. Only this class changes their state.

    A world exists from its start until its last rank has been reaped. :meth:`serve` is the loop of the fork server,
    which waits for messages, exits of ranks, and the controller's end.
    """

    def __init__(self, connection: Connection, begin: Serve, *, launched: bool) -> None:
        """`launched` is True if a launcher has started this process, and not the controller."""
        self._session = begin.spec
        self._connection = connection
        # A launcher that started this process terminates its process group, so launched ranks must stay in it.
        self._own_group = not launched
        # A process that a test forked in the controller may keep the connection open forever, so EOF is not enough.
        self._controller_end = processes.end_of(begin.controller)
        self._woken, self._waker = unix_sockets.pair(blocking=False)
        self._ranks: dict[int, tuple[int, int]] = {}
        """The world and the rank of each process that has not been reaped, by its id."""
        self._known = children_of(os.getpid())
        """The children of this process that it had at the last look, or before the first rank.

        A plugin or a preloaded module may have started some of them; ranks have left the others.
        """
        self._oom_kills = oom_kills()
        """The number of out-of-memory kills when a rank was reaped last, or before the first rank."""

    def serve(self) -> None:
        """Serve requests until the controller has exited."""
        self._inherited_handlers = {
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
            signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda number, frame: None),
        }
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        ends = [] if self._controller_end is None else [self._controller_end]
        while self._controller_end not in wait([self._connection, self._woken, *ends]):
            with suppress(BlockingIOError):
                self._woken.recv(4096)
            self._reap()
            while self._connection.poll():
                try:
                    message: ServerRequest = decode(self._connection.recv_bytes(), ServerRequest)
                    number = message.descriptors if isinstance(message, StartWorld) else 0
                    locks = unix_sockets.receive_descriptors(self._connection, number) if number else []
                except (EOFError, OSError):
                    step("the driver has closed the connection")
                    return
                if isinstance(message, KillWorld):
                    self._kill(message.world)
                else:
                    spec = read_file(locks.pop(0), WorldSpec) if message.spec is None else message.spec
                    self._start(spec, message.port, locks)
        step("the driver has exited")

    def _leave(self) -> None:
        """Close, in a forked rank, what only the server uses, and restore the handlers of signals."""
        for number, handler in self._inherited_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None if a library has installed the handler.
        for one in (self._connection, self._woken, self._waker):
            one.close()
        if self._controller_end is not None:
            os.close(self._controller_end)

    def _start(self, spec: WorldSpec, port: int | None, locks: Sequence[int] = ()) -> None:
        """Start the ranks of `spec` that belong to this server.

        `port` is the port of the world's store if another server has created it. The ranks inherit the descriptors
        `locks`, which are closed in this process before another world is started.
        """
        pids: list[int] = []
        store: socket.socket | None = None
        try:
            with ExitStack() as stack:
                for descriptor in locks:
                    stack.callback(os.close, descriptor)
                if spec.key.grouped and port is None:
                    store = stack.enter_context(_reserve_port(host_of(spec)))
                    port = store.getsockname()[1]
                for rank, server in enumerate(spec.servers):
                    if server == self._session.server:
                        pids.append(self._fork(spec, rank, port, store, locks))
                        if store is not None:
                            store.close()  # Only rank 0 inherits it. It is the first rank of the server that opens it.
                            store = None
                send(self._connection, WorldStarted(spec.world, tuple(pids), port))
        except Exception as error:
            step("cannot start world %d: %r", spec.world, error)
            self._kill(spec.world)
            # The text of `_check_loopback` is for users.
            text = str(error) if isinstance(error, ConnectionError) else traceback.format_exc()
            send(self._connection, WorldStarted(spec.world, problem=text))

    def _fork(
        self, spec: WorldSpec, rank: int, port: int | None, store: socket.socket | None, locks: Sequence[int]
    ) -> int:
        """Fork a rank, which alone inherits its socket, and return its pid. Raises OSError."""
        path = rank_path(self._session.directory, spec.world, rank, "sock")
        with unix_sockets.listen(path, _BACKLOG) as listener:
            role = Role(spec, rank, listener.fileno(), port, None if store is None else store.fileno(), tuple(locks))
            pid = fork_rank(self._session, role, leave_server=self._leave, own_group=self._own_group)
        self._ranks[pid] = spec.world, rank
        step("rank %d of world %d is process %d", rank, spec.world, pid)
        return pid

    def _kill(self, number: int) -> None:
        """Kill the ranks of a world."""
        pids = [pid for pid, (world, _) in self._ranks.items() if world == number]
        step("kills %d ranks of world %d", len(pids), number)
        for pid in pids:
            kill_tree(pid)

    def _reap(self) -> None:
        """Collect the exit statuses of all children that have exited, and send the exits of ranks.

        Processes that ranks have left running are killed: always in the ranks' process groups, and elsewhere unless all
        these ranks have retired.
        """
        exits = list(self._collect_exits())
        if not exits:
            return
        before, self._oom_kills = self._oom_kills, oom_kills()
        children = children_of(os.getpid()).difference(self._ranks)
        orphans, self._known = children - self._known, children  # This process adopts what ranks leave.
        # Nothing tells which of these ranks has left an orphan.
        if any(status != RETIRED << 8 for _, _, status in exits):
            for pid in orphans:
                if not cleans_up(pid):
                    kill_tree(pid)
        for world, rank, status in exits:
            end = exit_of(os.waitstatus_to_exitcode(status), before, self._oom_kills)
            send(self._connection, RankExited(world, rank, end))

    def _collect_exits(self) -> Iterator[tuple[int, int, int]]:
        """Reap all children that have exited, and kill the process groups of ranks; yield world, rank and status."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._ranks:
                world, rank = self._ranks.pop(pid)
                how = "retired" if status == RETIRED << 8 else f"status {os.waitstatus_to_exitcode(status)}"
                step("rank %d of world %d has exited: %s", rank, world, how)
                kill_group(pid)
                yield world, rank, status


def exit_of(status: int, before: int | None, after: int | None) -> RankExit:
    """Return the exit of a rank with `status`: out of memory if that is SIGKILL, and the kernel's counter went up."""
    killed = status == -signal.SIGKILL and before is not None and after is not None and after > before
    return RankExit(ExitCause.OUT_OF_MEMORY, status) if killed else exited(status)


def send(connection: Connection, message: ServerReport) -> None:
    """Send `message` to the pool."""
    with suppress(OSError):  # The controller has exited, which the server notices next.
        connection.send_bytes(encode(message))


def _reserve_port(address: str) -> socket.socket:
    """Return a listening socket on a free port of `address`. Raises OSError.

    The world keeps the socket until it ends, so that no other process can take the port.
    """
    if address == LOOPBACK:
        _check_loopback()
    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    reserved.bind((address, 0))
    reserved.listen(1024)
    return reserved


@cache
def _check_loopback() -> None:
    """Raise ConnectionError if no connection to `LOOPBACK` is possible: torch would try for minutes."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        try:
            socket.create_connection(listener.getsockname(), 2.0).close()  # It takes microseconds.
        except OSError as error:
            raise ConnectionError(
                f"the loopback interface {loopback_interface()} is down, or its connections are blocked: {LOOPBACK} "
                f"cannot be reached ({error.strerror or error}); the ranks of a process group need it "
                "(ip link set lo up)"
            ) from None
