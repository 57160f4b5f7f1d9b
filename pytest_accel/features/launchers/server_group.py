"""Fork servers that start worlds together: those of launched processes, of several machines, or of an MPI job."""

from __future__ import annotations

from asyncio import gather, get_running_loop
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from signal import SIGKILL

from msgspec import structs

from pytest_accel.forkserver.client import ForkServerClient
from pytest_accel.forkserver.server_messages import ServerReport, StartFailed, WorldStarted
from pytest_accel.forkserver.server_process import Spawn
from pytest_accel.messages.rank_exit import exited
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.local_starter import report_to
from pytest_accel.pool.starter import StarterReports


@dataclass(slots=True)
class _Starting:
    """A world whose ranks have not all been forked yet."""

    spec: WorldSpec
    descriptors: Callable[[], Sequence[int]]
    requested: list[int]
    """The servers that were asked for their ranks; the others need the port of the world's store first."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process id by rank."""


class ServerGroup:
    """Fork servers, each started when a world first needs it. Used in the pool's thread, in which it reports."""

    def __init__(self, spec: SessionSpec, reports: StarterReports, on_end: Callable[[int, str | None], None]) -> None:
        """`on_end` gets the number of a server that has ended, and `ServerProcess.loss`."""
        self._spec = spec
        self.reports = reports
        self._on_end = on_end
        self._servers: dict[int, ForkServerClient] = {}
        """The running servers, by number."""
        self._starting: dict[int, _Starting] = {}
        """The worlds that have neither started nor been killed, by number."""

    def run(self, spawns: Mapping[int, Spawn]) -> None:
        """Start those of these servers that do not run. Raise OSError if that is not possible."""
        for number, spawn in spawns.items():
            if number not in self._servers:
                spec, report = structs.replace(self._spec, server=number), partial(self._report, number)
                self._servers[number] = ForkServerClient(spec, spawn, report, self._ended)

    @property
    def running(self) -> Collection[int]:
        """The numbers of the servers that run."""
        return self._servers.keys()

    def start(self, spec: WorldSpec, descriptors: Callable[[], Sequence[int]]) -> None:
        """Start the ranks of a world, whose servers run. Those of this machine get the locks `descriptors`."""
        servers = sorted(spec.server_numbers)
        # Rank 0 serves the store, so its server opens the port first; the other servers are told the port.
        first = [spec.server_of(0)] if spec.grouped else servers
        starting = self._starting[spec.world] = _Starting(spec, descriptors, first)
        for number in first:
            self._servers[number].start(spec, self._locks(starting, number))

    def kill(self, spec: WorldSpec, after: float) -> None:
        """Kill the ranks of a world in some seconds; report as killed those that no server was asked to start."""
        for number in spec.server_numbers & self._servers.keys():
            self._servers[number].kill(spec.world, after)
        starting = self._starting.pop(spec.world, None)
        for rank in range(spec.ranks if starting is not None else 0):
            if starting is not None and spec.server_of(rank) not in starting.requested:
                get_running_loop().call_soon(self.reports.exited, spec.world, rank, exited(-SIGKILL))

    def kill_servers(self, numbers: Collection[int]) -> None:
        """Kill these servers; reports of their ends follow."""
        for number in self._servers.keys() & set(numbers):
            self._servers[number].kill_server()

    async def stop(self) -> bool:
        """Stop all servers, the one of this process last; return False if some of their processes may live on."""
        servers, self._servers = self._servers, {}
        own = servers.pop(0, None)
        stopped = await gather(*(server.stop() for server in servers.values()))
        return all(stopped) and (own is None or await own.stop())

    @staticmethod
    def _locks(starting: _Starting, server: int) -> Sequence[int]:
        """Return the locks that a server passes to its ranks: those of another machine can have none."""
        spec = starting.spec
        here = any(not spec.is_remote(rank) for rank in range(spec.ranks) if spec.server_of(rank) == server)
        return starting.descriptors() if here else ()

    def _report(self, server: int, message: ServerReport) -> None:
        if isinstance(message, WorldStarted):
            self._started(server, message)
        else:
            if isinstance(message, StartFailed) and self._starting.pop(message.world, None) is not None:
                for other in self._servers.values():  # None of the world is started.
                    other.kill(message.world)
            report_to(self.reports, message)

    def _started(self, server: int, message: WorldStarted) -> None:
        """Note that a server has forked its ranks of a world; the other servers follow."""
        starting = self._starting.get(message.world)
        if starting is None:
            return  # The world has been killed meanwhile.
        spec = starting.spec
        mine = (rank for rank in range(spec.ranks) if spec.server_of(rank) == server)
        starting.pids.update(zip(mine, message.pids, strict=True))
        for other in sorted(spec.server_numbers.difference(starting.requested) & self._servers.keys()):
            starting.requested.append(other)
            self._servers[other].start(spec, self._locks(starting, other), message.port)
        if len(starting.pids) == spec.ranks:
            del self._starting[message.world]
            self.reports.started(message.world, tuple(starting.pids[rank] for rank in range(spec.ranks)))

    def _ended(self, server: int, loss: str | None) -> None:
        self._servers.pop(server, None)
        self._on_end(server, loss)
