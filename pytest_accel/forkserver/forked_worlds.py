"""The worlds of a fork server: their sockets, and the start, kill and exit of their ranks."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache

import psutil

from pytest_accel.core.clock import monotonic
from pytest_accel.core.kill import KILL_TIMEOUT, children_of, cleans_up, kill_group, kill_tree, living, survivors
from pytest_accel.core.log import step
from pytest_accel.core.paths import socket_path
from pytest_accel.forkserver.server_messages import RankExited, ServerReport, StartFailed, Survivors, WorldStarted
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.rank_exit import exited
from pytest_accel.messages.rank_messages import RETIRED
from pytest_accel.messages.role import LOOPBACK, Role, StorePort, host_of, loopback_interface
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec

_LOOK_INTERVAL = 0.1
"""Seconds between two looks at processes that were killed and live on."""
_BACKLOG = 128
"""Connections that may wait until a rank accepts them."""
_CONNECT_TIMEOUT = 2.0
"""Seconds in which the loopback interface must connect two sockets; it takes microseconds."""


@dataclass(slots=True)
class _ForkedWorld:
    """The ranks of a world that the fork server has not yet reaped, and what was killed with those that it has."""

    ranks: dict[int, int] = field(default_factory=dict)
    """By process id."""
    deadline: float | None = None
    """Time at which the ranks are killed (`clock.monotonic`); None: no kill is planned."""
    killed: set[psutil.Process] = field(default_factory=set)
    """The processes that were killed, as far as they are not known to have exited."""
    look_at: float | None = None
    """Time of the next look at whether `killed` live; None: none is planned."""
    survivors: bool = False
    """True if the pool was told of processes that live on."""


class ForkedWorlds:
    """The worlds that have ranks forked from this server, which owns the object. Only this class changes their state.

    A world exists from its start until its last rank has been reaped, and all that was killed with it has exited.
    """

    def __init__(
        self,
        session: SessionSpec,
        start_rank: Callable[[WorldSpec, int, WorldSockets], int],
        send: Callable[[ServerReport], None],
    ) -> None:
        """``start_rank(spec, rank, sockets)`` returns the pid of a new rank. `send` sends a message to the pool."""
        self._session = session
        self._start_rank = start_rank
        self._send = send
        self._worlds: dict[int, _ForkedWorld] = {}
        self._known = children_of(os.getpid())
        """The children of this process that no rank has just left.

        A plugin or the preloaded module may have started some before the first rank; ranks have left the others.
        """

    def __contains__(self, number: int) -> bool:
        return number in self._worlds

    @property
    def world_by_pid(self) -> dict[int, int]:
        """The number of the world of each rank, by the rank's process id."""
        return {pid: number for number, world in self._worlds.items() for pid in world.ranks}

    @property
    def due(self) -> float | None:
        """Time at which the next ranks are to be killed or looked at (`clock.monotonic`), or None."""
        times = (time for world in self._worlds.values() for time in (world.deadline, world.look_at))
        return min((time for time in times if time is not None), default=None)

    def start(self, spec: WorldSpec, port: int | None, held: Sequence[int] = ()) -> None:
        """Start the ranks of `spec` that belong to this server; `port` is that of :func:`_open_sockets`.

        The ranks inherit the descriptors `held`, which are closed in this process before another world is started.
        """
        world = self._worlds[spec.world] = _ForkedWorld()
        try:
            with _open_sockets(spec, self._session, port, held) as sockets:
                for rank in sockets.listeners:
                    pid = self._start_rank(spec, rank, sockets)
                    world.ranks[pid] = rank
                    step("rank %d of world %d is process %d", rank, spec.world, pid)
                self._send(WorldStarted(spec.world, tuple(world.ranks), sockets.port))
        except Exception as error:
            text = str(error) if isinstance(error, _NoLoopbackError) else traceback.format_exc()
            step("cannot start world %d: %r", spec.world, error)
            self.kill(spec.world)
            if not world.ranks:  # Otherwise `reap` removes the world.
                del self._worlds[spec.world]
            self._send(StartFailed(spec.world, text))

    def kill(self, number: int, after: float = 0.0) -> None:
        """Kill the ranks of a world after some seconds, in which they may exit by themselves."""
        self._worlds[number].deadline = monotonic() + after
        self.do_due()

    def do_due(self) -> None:
        """Kill the ranks whose deadline has passed, and look whether killed processes live on, where that is due."""
        now = monotonic()
        for number, world in list(self._worlds.items()):
            if world.deadline is not None and world.deadline <= now:
                world.deadline = None
                step("kills %d ranks of world %d", len(world.ranks), number)
                for pid in world.ranks:
                    world.killed |= kill_tree(pid)
                if world.look_at is None and not world.survivors:
                    world.look_at = now + KILL_TIMEOUT
            if world.look_at is not None and world.look_at <= now:
                self._report_survivors(number, world)
                if not world.ranks and not world.survivors:
                    del self._worlds[number]

    def reap(self) -> None:
        """Collect the exit statuses of all children that have exited, and send those of ranks.

        What a rank has left running in its process group is killed, and so is what it has moved elsewhere, unless all
        these ranks have retired.
        """
        exits = self._collect_exits()
        if not exits:
            return
        crashed = [number for number, ended in exits.items() if any(status != RETIRED << 8 for _, status in ended)]
        orphans = self._new_orphans()
        if crashed:
            # An orphan does not tell whose it was. One that lives on counts for each of these worlds.
            killed = {process for pid in orphans if not cleans_up(pid) for process in kill_tree(pid)}
            for number in crashed:
                self._worlds[number].killed |= killed
        for number, ended in exits.items():
            world = self._worlds[number]
            if not world.ranks:
                self._report_survivors(number, world)  # First: the world has not ended if there are any.
                if not world.survivors:
                    del self._worlds[number]
            for rank, status in ended:
                self._send(RankExited(number, rank, exited(os.waitstatus_to_exitcode(status))))

    def _collect_exits(self) -> dict[int, list[tuple[int, int]]]:
        """Reap all children that have exited, and kill the process groups of ranks.

        Return the ranks among them with their statuses, by the number of their world.
        """
        exits: dict[int, list[tuple[int, int]]] = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return exits
            if pid == 0:
                return exits
            number = self.world_by_pid.get(pid)
            if number is None:
                continue
            world = self._worlds[number]
            rank = world.ranks.pop(pid)
            how = "retired" if status == RETIRED << 8 else f"status {os.waitstatus_to_exitcode(status)}"
            step("rank %d of world %d has exited: %s", rank, number, how)
            exits.setdefault(number, []).append((rank, status))
            world.killed |= kill_group(pid)

    def _new_orphans(self) -> frozenset[int]:
        """Return the processes that ranks, which have just been reaped, have left: this process adopts them."""
        children = children_of(os.getpid()).difference(self.world_by_pid)
        new = children - self._known
        self._known = children
        return new

    def _report_survivors(self, number: int, world: _ForkedWorld) -> None:
        """Tell the pool which processes live on although they were killed, unless nothing has changed."""
        before, world.killed = world.killed, living(world.killed)
        world.look_at = monotonic() + _LOOK_INTERVAL if world.killed else None
        if (world.killed and not world.survivors) or (world.survivors and world.killed != before):
            world.survivors = bool(world.killed)
            self._send(Survivors(number, self._session.server, survivors(world.killed)))


class _NoLoopbackError(OSError):
    """Raised if processes of this machine cannot connect to each other; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class WorldSockets:
    """The sockets that the fork server opens for a world and passes to its ranks."""

    listeners: dict[int, socket.socket]
    """By rank: the socket on which it accepts drivers."""
    store_port: StorePort | None
    held: tuple[int, ...]
    """`Role.held`."""

    @property
    def port(self) -> int | None:
        """The port of the world's store, or None if it has no store."""
        return None if self.store_port is None else self.store_port.port

    def role(self, spec: WorldSpec, rank: int) -> Role:
        """Return the role of `rank`, in a process that has inherited all the sockets; close those of other ranks."""
        for other, listener in self.listeners.items():
            if other != rank:
                listener.close()
        return Role(spec, rank, self.listeners[rank], self.store_port, self.held)


@contextmanager
def _open_sockets(
    spec: WorldSpec, session: SessionSpec, port: int | None, held: Sequence[int]
) -> Iterator[WorldSockets]:
    """Open the sockets of the ranks that this server forks; at the end of the block, close them and `held` here.

    `port` is the port of the world's store if another server has created it. Raises OSError, and `_NoLoopbackError`
    before ranks would wait for each other.
    """
    with ExitStack() as stack:
        for descriptor in held:
            stack.callback(os.close, descriptor)
        listeners = {
            rank: stack.enter_context(unix_sockets.listen(socket_path(session.directory, spec.world, rank), _BACKLOG))
            for rank in range(spec.ranks)
            if spec.server_of(rank) == session.server
        }
        store = None
        if spec.grouped and port is None:
            if host_of(spec) == LOOPBACK:
                _check_loopback()
            store = stack.enter_context(_reserve_port(host_of(spec)))
            port = store.getsockname()[1]
        yield WorldSockets(listeners, None if port is None else StorePort(port, store), tuple(held))


def _reserve_port(address: str) -> socket.socket:
    """Return a listening socket on a free port of `address`.

    The world keeps the socket until it ends, so that no other process can take the port.
    """
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    held.bind((address, 0))
    held.listen(1024)
    return held


@cache
def _check_loopback() -> None:
    """Raise `_NoLoopbackError` if no connection to `LOOPBACK` is possible: torch would try for minutes."""
    with socket.socket() as listener, socket.socket() as caller:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        caller.settimeout(_CONNECT_TIMEOUT)
        try:
            caller.connect(listener.getsockname())
        except OSError as error:
            raise _NoLoopbackError(
                f"the loopback interface {loopback_interface()} is down, or its connections are blocked: {LOOPBACK} "
                f"cannot be reached ({error.strerror or error}); the ranks of a process group need it "
                "(ip link set lo up)"
            ) from None
