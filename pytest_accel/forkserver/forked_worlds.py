"""The worlds of a fork server: their sockets, and the start, kill and exit of their ranks."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

from pytest_accel.core.clock import monotonic
from pytest_accel.core.kill import children_of, cleans_up, kill_group, kill_tree
from pytest_accel.core.log import step
from pytest_accel.core.paths import rank_path
from pytest_accel.forkserver.server_messages import RankExited, ServerReport, StartFailed, WorldStarted
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.rank_exit import exited
from pytest_accel.messages.rank_messages import RETIRED
from pytest_accel.messages.role import LOOPBACK, Role, host_of, loopback_interface
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec

_BACKLOG = 128
"""Connections that may wait until a rank accepts them."""
_CONNECT_TIMEOUT = 2.0
"""Seconds in which the loopback interface must connect two sockets; it takes microseconds."""


class ForkedWorlds:
    """The worlds that have ranks forked from this server, which owns the object. Only this class changes their state.

    A world exists from its start until its last rank has been reaped.
    """

    def __init__(
        self,
        session: SessionSpec,
        fork: Callable[[Role, Collection[Role]], int],
        send: Callable[[ServerReport], None],
    ) -> None:
        """``fork(role, roles)`` forks the rank with one of the `roles` of a world; it returns the rank's process id.

        `send` sends a message to the pool.
        """
        self._session = session
        self._fork = fork
        self._send = send
        self._ranks: dict[int, tuple[int, int]] = {}
        """The world and the rank of each process that has not been reaped, by its id."""
        self._deadlines: dict[int, float] = {}
        """Time at which the ranks of a world are killed (`clock.monotonic`), by the number of the world."""
        self._known = children_of(os.getpid())
        """The children of this process that it had at the last look, or before the first rank.

        A plugin or a preloaded module may have started some of them; ranks have left the others.
        """

    @property
    def timeout(self) -> float | None:
        """Seconds until the next ranks are to be killed, or None."""
        due = min(self._deadlines.values(), default=None)
        return None if due is None else max(0.0, due - monotonic())

    def start(self, spec: WorldSpec, port: int | None, locks: Sequence[int] = ()) -> None:
        """Start the ranks of `spec` that belong to this server; `port` is as in :func:`_open_roles`.

        The ranks inherit the descriptors `locks`, which are closed in this process before another world is started.
        """
        pids: list[int] = []
        try:
            with _open_roles(spec, self._session, port, locks) as roles:
                for role in roles:
                    pids.append(self._fork(role, roles))
                    self._ranks[pids[-1]] = spec.world, role.rank
                    step("rank %d of world %d is process %d", role.rank, spec.world, pids[-1])
                self._send(WorldStarted(spec.world, tuple(pids), roles[0].port))
        except Exception as error:
            step("cannot start world %d: %r", spec.world, error)
            self.kill(spec.world)
            # The text of `_check_loopback` is for users.
            text = str(error) if isinstance(error, ConnectionError) else traceback.format_exc()
            self._send(StartFailed(spec.world, text))

    def kill(self, number: int, after: float = 0.0) -> None:
        """Kill the ranks of a world after some seconds, in which they may exit by themselves."""
        self._deadlines[number] = monotonic() + after
        self.do_due()

    def do_due(self) -> None:
        """Kill the ranks whose deadline has passed."""
        for number, deadline in list(self._deadlines.items()):
            if deadline <= monotonic():
                del self._deadlines[number]
                pids = [pid for pid, (world, _) in self._ranks.items() if world == number]
                step("kills %d ranks of world %d", len(pids), number)
                for pid in pids:
                    kill_tree(pid)

    def reap(self) -> None:
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
            if all(other != world for other, _ in self._ranks.values()):
                self._deadlines.pop(world, None)
            self._send(RankExited(world, rank, exited(os.waitstatus_to_exitcode(status))))

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


@contextmanager
def _open_roles(spec: WorldSpec, session: SessionSpec, port: int | None, locks: Sequence[int]) -> Iterator[list[Role]]:
    """Provide the roles of the ranks that this server forks; at the end of the block, close their descriptors here.

    `port` is the port of the world's store if another server has created it. Raises OSError.
    """
    with ExitStack() as stack:
        for descriptor in locks:
            stack.callback(os.close, descriptor)
        listeners = {
            rank: stack.enter_context(
                unix_sockets.listen(rank_path(session.directory, spec.world, rank, "sock"), _BACKLOG)
            )
            for rank in range(spec.ranks)
            if spec.server_of(rank) == session.server
        }
        store = None
        if spec.grouped and port is None:
            if host_of(spec) == LOOPBACK:
                _check_loopback()
            store = stack.enter_context(_reserve_port(host_of(spec)))
            port = store.getsockname()[1]
        yield [Role(spec, rank, listener, port, store, tuple(locks)) for rank, listener in listeners.items()]


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
