"""Fork servers that start worlds together: those of launched processes, of several machines, or of an MPI job."""

from __future__ import annotations

from asyncio import gather, get_running_loop
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from signal import SIGKILL

from msgspec import structs

from pytest_accel.core.kill import Survivor
from pytest_accel.forkserver.client import ForkServerClient
from pytest_accel.forkserver.server_process import Spawn
from pytest_accel.messages.rank_exit import RankExit, exited
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
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
        self._left: dict[tuple[int, int], tuple[Survivor, ...]] = {}
        """By world and server: the processes that live on although they were killed."""

    def run(self, spawns: Mapping[int, Spawn]) -> None:
        """Start those of these servers that do not run. Raise OSError if that is not possible."""
        for number, spawn in spawns.items():
            if number not in self._servers:
                reports = _ServerReports(self, number)
                self._servers[number] = ForkServerClient(structs.replace(self._spec, server=number), reports, spawn)

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

    def started_by(self, server: int, world: int, pids: tuple[int, ...], port: int | None) -> None:
        """Note that a server has forked its ranks of a world; the other servers follow."""
        starting = self._starting.get(world)
        if starting is None:
            return  # The world has been killed meanwhile.
        spec = starting.spec
        mine = (rank for rank in range(spec.ranks) if spec.server_of(rank) == server)
        starting.pids.update(zip(mine, pids, strict=True))
        for other in sorted(spec.server_numbers.difference(starting.requested) & self._servers.keys()):
            starting.requested.append(other)
            self._servers[other].start(spec, self._locks(starting, other), port)
        if len(starting.pids) == spec.ranks:
            del self._starting[world]
            self.reports.started(world, tuple(starting.pids[rank] for rank in range(spec.ranks)))

    def failed_by(self, world: int, why: str) -> None:
        """Note that a server could not fork its ranks of a world: none of the world is started."""
        starting = self._starting.pop(world, None)
        for server in self._servers.values() if starting is not None else ():
            server.kill(world)
        self.reports.not_started(world, why)

    def left_by(self, server: int, world: int, processes: tuple[Survivor, ...]) -> None:
        """Note which processes of a world live on although a server has killed them."""
        self._left[world, server] = processes
        left = (one for (number, _), found in self._left.items() if number == world for one in found)
        self.reports.left(world, tuple(left))

    def ended_by(self, server: int, loss: str | None) -> None:
        """Note that a server has ended."""
        self._servers.pop(server, None)
        self._left = {key: processes for key, processes in self._left.items() if key[1] != server}
        self._on_end(server, loss)


@dataclass(frozen=True, slots=True)
class _ServerReports:
    """The reports of one server of a group."""

    group: ServerGroup
    number: int

    def started(self, world: int, pids: tuple[int, ...], port: int | None) -> None:
        self.group.started_by(self.number, world, pids, port)

    def not_started(self, world: int, why: str) -> None:
        self.group.failed_by(world, why)

    def exited(self, world: int, rank: int, end: RankExit) -> None:
        self.group.reports.exited(world, rank, end)

    def left(self, world: int, processes: tuple[Survivor, ...]) -> None:
        self.group.left_by(self.number, world, processes)

    def note(self, text: str) -> None:
        self.group.reports.note(text)

    def broken(self, text: str) -> None:
        self.group.reports.broken_by(text)

    def ended(self, server: int, loss: str | None) -> None:
        self.group.ended_by(server, loss)
