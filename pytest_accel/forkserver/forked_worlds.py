"""The loop of a fork server, and its worlds: their sockets, and the start, kill and exit of their ranks."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from multiprocessing.connection import wait

from pytest_accel.core import processes
from pytest_accel.core.log import step
from pytest_accel.core.processes import children_of, cleans_up, kill_group, kill_tree
from pytest_accel.core.session_folder import rank_path
from pytest_accel.forkserver.rank_process import fork_rank
from pytest_accel.forkserver.server_messages import (
    KillWorld,
    RankExited,
    Serve,
    ServerReport,
    ServerRequest,
    StartWorld,
    WorldStarted,
    read_file,
)
from pytest_accel.messages import fd_passing, unix_sockets
from pytest_accel.messages.rank_exit import exited
from pytest_accel.messages.rank_messages import RETIRED
from pytest_accel.messages.role import LOOPBACK, Role, host_of, loopback_interface
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.messages.world_spec import WorldSpec

_BACKLOG = 128
"""Connections that may wait until a rank accepts them."""
_CONNECT_TIMEOUT = 2.0
"""Seconds in which the loopback interface must connect two sockets; it takes microseconds."""


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
                    locks = fd_passing.receive(self._connection, number) if number else []
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
        """Start the ranks of `spec` that belong to this server; `port` is as in :func:`_open_roles`.

        The ranks inherit the descriptors `locks`, which are closed in this process before another world is started.
        """
        pids: list[int] = []
        try:
            with _open_roles(spec, self._session, port, locks) as roles:
                for role in roles:
                    pids.append(
                        fork_rank(self._session, role, roles, leave_server=self._leave, own_group=self._own_group)
                    )
                    self._ranks[pids[-1]] = spec.world, role.rank
                    step("rank %d of world %d is process %d", role.rank, spec.world, pids[-1])
                send(self._connection, WorldStarted(spec.world, tuple(pids), roles[0].port))
        except Exception as error:
            step("cannot start world %d: %r", spec.world, error)
            self._kill(spec.world)
            # The text of `_check_loopback` is for users.
            text = str(error) if isinstance(error, ConnectionError) else traceback.format_exc()
            send(self._connection, WorldStarted(spec.world, problem=text))

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
        children = children_of(os.getpid()).difference(self._ranks)
        orphans, self._known = children - self._known, children  # This process adopts what ranks leave.
        # Nothing tells which of these ranks has left an orphan.
        if any(status != RETIRED << 8 for _, _, status in exits):
            for pid in orphans:
                if not cleans_up(pid):
                    kill_tree(pid)
        for world, rank, status in exits:
            send(self._connection, RankExited(world, rank, exited(os.waitstatus_to_exitcode(status))))

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


def send(connection: Connection, message: ServerReport) -> None:
    """Send `message` to the pool."""
    with suppress(OSError):  # The controller has exited, which the server notices next.
        connection.send_bytes(encode(message))


@contextmanager
def _open_roles(spec: WorldSpec, session: SessionSpec, port: int | None, locks: Sequence[int]) -> Iterator[list[Role]]:
    """Provide the roles of the ranks that this server forks; at the end of the block, close their descriptors here.

    `port` is the port of the world's store if another server has created it. Raises OSError.
    """
    with ExitStack() as stack:
        for descriptor in locks:
            stack.callback(os.close, descriptor)
        roles, store = [], None
        if spec.grouped and port is None:
            if host_of(spec) == LOOPBACK:
                _check_loopback()
            reserved = stack.enter_context(_reserve_port(host_of(spec)))
            store, port = reserved.fileno(), reserved.getsockname()[1]
        for rank in range(spec.ranks):
            if spec.server_of(rank) == session.server:
                path = rank_path(session.directory, spec.world, rank, "sock")
                listener = stack.enter_context(unix_sockets.listen(path, _BACKLOG)).fileno()
                roles.append(Role(spec, rank, listener, port, None if rank else store, tuple(locks)))
        yield roles


def _reserve_port(address: str) -> socket.socket:
    """Return a listening socket on a free port of `address`.

    The world keeps the socket until it ends, so that no other process can take the port.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    reserved.bind((address, 0))
    reserved.listen(1024)
    return reserved


@cache
def _check_loopback() -> None:
    """Raise ConnectionError if no connection to `LOOPBACK` is possible: torch would try for minutes."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        try:
            socket.create_connection(listener.getsockname(), _CONNECT_TIMEOUT).close()
        except OSError as error:
            raise ConnectionError(
                f"the loopback interface {loopback_interface()} is down, or its connections are blocked: {LOOPBACK} "
                f"cannot be reached ({error.strerror or error}); the ranks of a process group need it "
                "(ip link set lo up)"
            ) from None
