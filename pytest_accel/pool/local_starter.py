"""The starter of this machine: its fork server, and the leases on its devices and CPU slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from pytest_accel.core.kill import Survivor, kill_marked
from pytest_accel.core.paths import server_log_path
from pytest_accel.core.truncation import tail
from pytest_accel.core.world_key import WorldKey
from pytest_accel.forkserver.client import ForkServerClient
from pytest_accel.forkserver.server_process import Spawn
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.leases import HeldLease, Leases
from pytest_accel.leases.shared_folder import LockFolderError
from pytest_accel.messages.rank_exit import ExitCause, RankExit
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.starter import PlaceError, StarterReports, Waiting


class LocalStarter:
    """The starter of this machine. A fork server that has ended is replaced when the next world is started."""

    def __init__(self, spec: SessionSpec, leases: Leases, spawn: Spawn, reports: StarterReports) -> None:
        """`spawn` starts the fork server."""
        self.leases = leases
        self.spec = spec
        self.spawn = spawn
        self.reports = reports
        self._server: ForkServerClient | None = None

    def keeps(self, key: WorldKey) -> bool:
        return key.need is not None

    def unavailable(self, demand: WorldDemand) -> str | None:
        return self.leases.unavailable(demand)

    async def take(self, demand: WorldDemand) -> HeldLease:
        try:
            return await self.leases.take(demand)
        except LockFolderError as error:
            raise PlaceError(str(error)) from error

    def waiting(self, demand: WorldDemand) -> Waiting | None:
        obstacles = self.leases.waiting(demand)
        return None if obstacles is None else Waiting(self.leases.what(demand), obstacles)

    def pass_on(self, taken: HeldLease, unclaimed: Callable[[], None]) -> bool:
        return self.leases.pass_on(taken, unclaimed)

    def describe(self, taken: HeldLease, *, test: str | None = None, pids: Sequence[int] = ()) -> None:
        self.leases.describe(taken, test=test, pids=pids or None)

    def give_back(self, taken: HeldLease, *, killed: bool) -> None:
        self.leases.give_back(taken, killed=killed)

    def place(self, spec: WorldSpec, taken: HeldLease) -> WorldSpec:
        return replace(spec, devices=taken.devices)

    def warm(self) -> None:
        """Start the fork server."""
        if self._server is None:
            self._server = ForkServerClient(self.spec, self, self.spawn)

    def start(self, spec: WorldSpec, taken: HeldLease) -> None:
        self.warm()
        assert self._server is not None
        self._server.start(spec, taken.descriptors)

    def kill(self, spec: WorldSpec, after: float) -> None:
        if self._server is not None:
            self._server.kill(spec.world, after)

    def kill_silent(self, spec: WorldSpec, ranks: Collection[int]) -> None:
        if self._server is not None:
            self._server.kill_server()

    def forget(self, spec: WorldSpec) -> None:
        pass

    async def stop(self) -> bool:
        """End the fork server and its ranks; return False if some processes may live on."""
        server, self._server = self._server, None
        return server is None or await server.stop()

    # Called by the fork server's client

    def started(self, world: int, pids: tuple[int, ...], port: int | None) -> None:
        self.reports.started(world, pids)

    def not_started(self, world: int, why: str) -> None:
        self.reports.not_started(world, why)

    def exited(self, world: int, rank: int, end: RankExit) -> None:
        self.reports.exited(world, rank, end)

    def left(self, world: int, processes: tuple[Survivor, ...]) -> None:
        self.reports.left(world, processes)

    def note(self, text: str) -> None:
        self.reports.note(text)

    def broken(self, text: str) -> None:
        self.reports.broken_by(text)

    def ended(self, server: int, loss: str | None) -> None:
        """Report that the fork server has ended, and its ranks with it."""
        self._server = None
        why = (
            f"the fork server ended twice while starting a world\n{tail(server_log_path(self.spec.directory, server))}"
        )
        cleanup = partial(kill_marked, self.spec.directory, server)
        self.reports.lost_ranks(self, server, RankExit(ExitCause.SERVER_ENDED), why, cleanup)
