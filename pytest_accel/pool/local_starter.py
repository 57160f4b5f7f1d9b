"""The starter of this machine: its fork server, and the leases on its devices and CPU slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from pytest_accel.core.world_key import WorldKey
from pytest_accel.forkserver.client import ForkServerClient
from pytest_accel.forkserver.server_process import Spawn
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.leases import HeldLease, Leases
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.starter import StarterReports


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

    async def take(self, demand: WorldDemand) -> HeldLease:
        return await self.leases.take(demand)

    def waiting(self, demand: WorldDemand) -> tuple[str, list[str]] | None:
        obstacles = self.leases.waiting(demand)
        return None if obstacles is None else (self.leases.what(demand), obstacles)

    def hand_on(self, taken: HeldLease) -> WorldDemand | None:
        return self.leases.hand_on(taken)

    def describe(self, taken: HeldLease, test: str, pids: Sequence[int]) -> None:
        self.leases.describe(taken, test, pids)

    def give_back(self, taken: HeldLease, *, killed: bool) -> None:
        self.leases.give_back(taken, killed=killed)

    def place(self, spec: WorldSpec, taken: HeldLease) -> WorldSpec:
        return replace(spec, devices=taken.devices)

    def warm(self) -> None:
        """Start the fork server."""
        if self._server is None:
            self._server = ForkServerClient(self.spec, self.spawn, self.reports.report, self._server_ended)

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

    def _server_ended(self, server: int, loss: str | None) -> None:
        self._server = None
        self.reports.lost_ranks(self, server, loss)
