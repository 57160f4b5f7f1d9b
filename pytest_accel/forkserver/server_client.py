"""The pool's clients of fork servers: start them, exchange messages with them, and notice their exits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from signal import SIGKILL
from socket import SHUT_RDWR
from threading import Lock, RLock
from traceback import format_exc

from msgspec import structs

from pytest_accel.core import session_folder, threads
from pytest_accel.core.clock import monotonic
from pytest_accel.core.kill import KILL_TIMEOUT
from pytest_accel.forkserver.server_messages import (
    KillWorld,
    RankExited,
    ServerReport,
    StartFailed,
    StartWorld,
    WorldStarted,
)
from pytest_accel.forkserver.server_process import Spawn, spawn_here
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.fd_passing import socket_of
from pytest_accel.messages.rank_exit import exited
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection, is_readable
from pytest_accel.messages.world_spec import WorldSpec

__all__ = ["ForkServerClient", "ForkServerGroup", "ServerCallbacks", "Spawn", "spawn_here"]
_STOP_TIMEOUT = 10.0
"""Seconds that a stopped server has to exit before it is killed."""
_TICK_INTERVAL = 1.0
"""Seconds between two calls of `ServerCallbacks.on_tick`."""


@dataclass(frozen=True, slots=True)
class ServerCallbacks:
    """The callbacks of fork servers. They are called in threads of the servers' clients."""

    on_message: Callable[[object], None]
    """Called with each message of a fork server."""
    on_end: Callable[[int, str | None], None]
    """Called once a fork server has exited, whatever the cause, with its number and `ServerProcess.loss`."""
    on_tick: Callable[[], None]
    """Called about once a second."""
    on_failure: Callable[[str], None]
    """Called with the traceback if another callback has raised. The thread ends and handles no further messages."""


class ForkServerClient:
    """A running fork server, started by this object."""

    def __init__(self, spec: SessionSpec, callbacks: ServerCallbacks, spawn: Spawn = spawn_here) -> None:
        session_folder.ensure(spec.directory)
        ours, theirs = unix_sockets.pair()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            unix_sockets.limit_writes(ours)
            unix_sockets.limit_reads(ours, unix_sockets.WRITE_TIMEOUT)  # Only after a part of a message has arrived.
            self._process = spawn(spec, theirs)
            undo.pop_all()
        self._connection = Connection(ours.detach())
        self._spec = spec
        self._used = False
        self._sending = Lock()
        self._callbacks = callbacks
        try:
            self._thread = threads.start(self._listen, "accel-starter")
        except threads.NoThreadError:
            self._process.kill()
            self._process.wait(KILL_TIMEOUT)
            self._connection.close()
            raise

    def send(self, message: object) -> None:
        """Send `message`. Never raise: if the server has exited, `on_end` is called."""
        with self._sending, suppress(OSError):
            self._used = self._used or isinstance(message, StartWorld)
            try:
                self._connection.send_bytes(encode(message))
            except BlockingIOError:  # The server does not read, and may have got a part of the message.
                self._process.kill()

    def kill(self) -> None:
        """Kill the server. `on_end` is called as soon as it has exited."""
        self._process.kill()

    def stop(self) -> bool:
        """Stop the server, which kills all its descendants, and wait for its exit.

        Return False if it did not exit in time and was killed, so that its descendants may live on.
        """
        if not self._used:
            self._process.kill()  # The server may still be importing; do not wait for that.
        # Not close(): the thread may be waiting on the descriptor.
        with suppress(OSError), socket_of(self._connection) as end:
            end.shutdown(SHUT_RDWR)
        exited = self._end_process()
        if threads.end(self._thread):
            self._connection.close()
        return exited

    def _end_process(self) -> bool:
        """Wait for the exit of the server; kill it after `_STOP_TIMEOUT`, and return False then."""
        if self._process.wait(_STOP_TIMEOUT):
            return True
        self._process.kill()
        self._process.wait(KILL_TIMEOUT)
        return False

    def _listen(self) -> None:
        try:
            self._receive_messages()
        except BaseException:
            self._callbacks.on_failure(
                f"the thread that listens to the fork server has ended with an error:\n{format_exc()}"
            )

    def _receive_messages(self) -> None:
        tick = monotonic() + _TICK_INTERVAL
        while True:
            try:
                arrived = is_readable(self._connection.fileno(), max(0.0, tick - monotonic()))
                message = decode(self._connection.recv_bytes(), ServerReport) if arrived else None
            except (EOFError, OSError):
                break
            if arrived:
                self._callbacks.on_message(message)
            if monotonic() >= tick:
                self._callbacks.on_tick()
                tick = monotonic() + _TICK_INTERVAL
        self._end_process()
        self._callbacks.on_end(self._spec.server, self._process.loss)


@dataclass(slots=True)
class _Starting:
    """A world whose ranks have not all been forked yet."""

    spec: WorldSpec
    requested: list[int]
    """The servers that have been sent `StartWorld`; for the others, the port of the world's store is needed first."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process id by rank."""

    def ranks_of(self, server: int) -> list[int]:
        return [rank for rank in range(self.spec.ranks) if self.spec.server_of(rank) == server]


class ForkServerGroup:
    """Fork servers that are started when a world needs them, and that end independently of each other.

    A world's ranks may come from several of them. The messages about such a world are combined.
    """

    def __init__(self, callbacks: ServerCallbacks, lock: RLock) -> None:
        """`lock` is the owner's lock, which the owner holds in all calls except :meth:`stop`.

        The callbacks get the lock held, except for `on_failure`. One of the servers calls `on_tick`.
        """
        self._lock = lock
        self._callbacks = callbacks
        self._starting: dict[int, _Starting] = {}
        self._clients: dict[int, ForkServerClient] = {}
        """The clients of the running servers, by the server's number."""

    @property
    def running(self) -> Collection[int]:
        """The numbers of the servers that run."""
        return self._clients.keys()

    def run(self, spec: SessionSpec, spawns: Mapping[int, Spawn]) -> None:
        """Start those of the servers in `spawns` that do not run. Raise OSError or NoThreadError if one fails."""
        for number, spawn in spawns.items():
            if number not in self._clients:
                of_server = replace(
                    self._callbacks,
                    on_message=partial(self._handle_message, number),
                    on_end=self._server_ended,
                    on_tick=partial(self._tick, number),
                )
                self._clients[number] = ForkServerClient(structs.replace(spec, server=number), of_server, spawn)

    def send(self, message: object) -> None:
        """Send `message` to all servers. Never raise: if a server has exited, `on_end` is called.

        The servers of a world that is to be started must run.
        """
        if isinstance(message, StartWorld):
            self._start(message.spec)
            return
        for client in self._clients.values():
            client.send(message)  # A server without ranks of the world ignores the message.
        if isinstance(message, KillWorld):
            self._report_unstarted(message.world)

    def kill(self, numbers: Collection[int] | None = None) -> None:
        """Kill these servers, or all. `on_end` is called as soon as one has exited."""
        for number, client in self._clients.items():
            if numbers is None or number in numbers:
                client.kill()

    def stop(self) -> bool:
        """Stop the servers, which kill all their descendants. `on_end` is not called.

        Return False if one of them did not, since it did not exit in time.
        """
        with self._lock:
            clients, self._clients = self._clients, {}
            self._starting.clear()
        # The driver's own server, number 0, is stopped last, since it removes the session's folder.
        stopped = [clients[number].stop() for number in sorted(clients, reverse=True)]
        return all(stopped)

    def _start(self, spec: WorldSpec) -> None:
        servers = sorted({spec.server_of(rank) for rank in range(spec.ranks)})
        # Rank 0 serves the store, so its server opens the port first; the other servers are sent that port.
        requested = [spec.server_of(0)] if spec.grouped else servers
        self._starting[spec.world] = _Starting(spec, requested)
        for server in requested:
            self._clients[server].send(StartWorld(spec))

    def _handle_message(self, server: int, message: object) -> None:
        with self._lock:
            if isinstance(message, WorldStarted):
                self._started(server, message)
                return
            if isinstance(message, StartFailed) and self._starting.pop(message.world, None) is not None:
                for client in self._clients.values():
                    client.send(KillWorld(message.world))
            self._callbacks.on_message(message)

    def _started(self, server: int, message: WorldStarted) -> None:
        starting = self._starting.get(message.world)
        if starting is None:
            return  # The world has been killed meanwhile.
        spec = starting.spec
        starting.pids.update(zip(starting.ranks_of(server), message.pids, strict=True))
        for rank in range(spec.ranks):
            other = spec.server_of(rank)
            if other not in starting.requested and other in self._clients:  # Otherwise `on_end` has been called.
                starting.requested.append(other)
                self._clients[other].send(StartWorld(spec, message.port))
        if len(starting.pids) == spec.ranks:
            del self._starting[spec.world]
            self._callbacks.on_message(
                WorldStarted(spec.world, tuple(starting.pids[rank] for rank in range(spec.ranks)))
            )

    def _report_unstarted(self, world: int) -> None:
        """Report as killed the ranks of `world` that no server was asked to start; no-op if it is not starting."""
        starting = self._starting.pop(world, None)
        if starting is None:
            return
        for rank in range(starting.spec.ranks):
            if starting.spec.server_of(rank) not in starting.requested:
                self._callbacks.on_message(RankExited(world, rank, exited(-SIGKILL)))

    def _tick(self, server: int) -> None:
        with self._lock:
            if server == min(self._clients, default=None):  # One of the servers' threads is enough.
                self._callbacks.on_tick()

    def _server_ended(self, server: int, loss: str | None) -> None:
        with self._lock:
            if self._clients.pop(server, None) is not None:  # Otherwise it has been stopped.
                for world, starting in list(self._starting.items()):
                    if starting.spec.server_numbers.isdisjoint(self._clients):
                        del self._starting[world]
                self._callbacks.on_end(server, loss)
