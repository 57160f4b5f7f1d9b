"""Fork servers that start worlds together, in launched processes, on several machines, or in an MPI job."""

from __future__ import annotations

from asyncio import gather, get_running_loop
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from signal import SIGKILL

from msgspec import structs

from pytest_accel.forkserver.client import ForkServerClient
from pytest_accel.forkserver.server_messages import RankExited, ServerReport, WorldStarted
from pytest_accel.forkserver.server_process import Spawn
from pytest_accel.messages.rank_messages import exited
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec


@dataclass(slots=True)
class _Starting:
    """A world whose ranks have not all been forked yet."""

    spec: WorldSpec
    descriptors: Callable[[], Sequence[int]]
    pids: dict[int, int] = field(default_factory=dict)
    """Process id by rank. First comes rank 0, which serves the world's store: the other servers need its port."""


class ServerGroup:
    """Fork servers, each started when a world first needs it. Used in the pool's thread, in which it reports."""

    def __init__(
        self, spec: SessionSpec, report: Callable[[ServerReport], None], on_end: Callable[[int, str | None], None]
    ) -> None:
        """`report` gets the reports of the servers, in which a `WorldStarted` has the process ids of all ranks.

        `on_end` gets the number of a server that has ended, and `ServerProcess.loss`.
        """
        self._spec = spec
        self._report = report
        self._on_end = on_end
        self._servers: dict[int, ForkServerClient] = {}
        """The running servers, by number."""
        self._starting: dict[int, _Starting] = {}
        """The worlds that have neither started nor been killed, by number."""

    def run(self, spawns: Mapping[int, Spawn]) -> None:
        """Start each of these servers that does not run. Raise OSError if it cannot be started."""
        for number, spawn in sorted(spawns.items()):
            if number not in self._servers:
                spec, report = structs.replace(self._spec, server=number), partial(self._pass_on, number)
                self._servers[number] = ForkServerClient(spec, spawn, report, self._ended)

    @property
    def running(self) -> Collection[int]:
        """The numbers of the servers that run."""
        return self._servers.keys()

    def start_ranks(self, spec: WorldSpec, descriptors: Callable[[], Sequence[int]]) -> None:
        """Start the ranks of a world, whose servers run. Those of this machine get the locks `descriptors`."""
        starting = self._starting[spec.world] = _Starting(spec, descriptors)
        self._start_in(starting, spec.servers[0])

    def _start_in(self, starting: _Starting, server: int, port: int | None = None) -> None:
        # The locks of another machine are not passed to its ranks.
        spec = starting.spec
        here = any(not spec.is_remote(rank) for rank, number in enumerate(spec.servers) if number == server)
        self._servers[server].start(spec, starting.descriptors() if here else None, port)

    def kill(self, spec: WorldSpec) -> None:
        """Kill the ranks of a world; report as killed the ranks that no server was asked to start."""
        for number in self._servers.keys() & set(spec.servers):
            self._servers[number].kill(spec.world)
        starting = self._starting.pop(spec.world, None)
        for rank in range(spec.ranks if starting is not None and not starting.pids else 0):
            # Until rank 0 is forked, only its server was asked. No report of the other servers would come.
            if spec.servers[rank] != spec.servers[0]:
                get_running_loop().call_soon(self._report, RankExited(spec.world, rank, exited(-SIGKILL)))

    def kill_servers(self, spec: WorldSpec) -> None:
        """Kill the servers of a world; reports of their ends follow."""
        for number in self._servers.keys() & set(spec.servers):
            self._servers[number].kill_server()

    async def stop(self) -> bool:
        """Stop all servers, this process's server last; return False if some of their processes may live on."""
        servers, self._servers = self._servers, {}
        own = servers.pop(0, None)
        stopped = await gather(*(server.stop() for server in servers.values()))
        return all(stopped) and (own is None or await own.stop())

    def _pass_on(self, server: int, message: ServerReport) -> None:
        if isinstance(message, WorldStarted) and not message.problem:
            self._started(server, message)
            return
        if isinstance(message, WorldStarted) and self._starting.pop(message.world, None) is not None:
            for other in self._servers.values():  # A world starts as a whole or not at all.
                other.kill(message.world)
        self._report(message)

    def _started(self, server: int, message: WorldStarted) -> None:
        """Note that a server has forked its ranks of a world; after the first server, the others follow."""
        starting = self._starting.get(message.world)
        if starting is None:
            return  # The world has been killed meanwhile.
        spec = starting.spec
        if not starting.pids:
            for other in sorted(self._servers.keys() & set(spec.servers) - {server}):
                self._start_in(starting, other, message.port)
        mine = (rank for rank, number in enumerate(spec.servers) if number == server)
        starting.pids.update(zip(mine, message.pids, strict=True))
        if len(starting.pids) == spec.ranks:
            del self._starting[message.world]
            pids = tuple(starting.pids[rank] for rank in range(spec.ranks))
            self._report(WorldStarted(message.world, pids))

    def _ended(self, server: int, loss: str | None) -> None:
        self._servers.pop(server, None)
        self._on_end(server, loss)
