"""The fork servers of a session or of an MPI job. Each forks the ranks of a world that belong to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from signal import SIGKILL
from threading import RLock

from msgspec import structs

from pytest_accel.core.rank_exit import exited
from pytest_accel.core.server_messages import KillWorld, RankExited, StartFailed, StartWorld, WorldStarted
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.forkserver.server_client import ForkServerClient, ServerCallbacks, Spawn


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
        """Start those of the servers in `spawns` that do not run. Raise OSError if that is impossible."""
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
