"""The starters of ranks, as the pool knows them: they take the devices of a world, and start and kill its ranks.

The fork server of this machine with its leases is one starter; an MPI job, the processes of a launcher and a cluster
are others. The pool calls a starter in its own thread only, and the starter reports to the pool in that thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from socket import gethostname
from typing import Any, Protocol, TypeVar

from pytest_accel.core.world_key import WorldKey
from pytest_accel.forkserver.client import ForkServerClient
from pytest_accel.forkserver.server_messages import ServerReport
from pytest_accel.forkserver.server_process import Spawn
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.leases import HeldLease, Leases
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec


class Taken(Protocol):
    """The devices or CPU slots that a starter has taken for a world, such as a lease."""

    @property
    def wanted(self) -> bool:
        """True if another request waits for these devices or slots."""


class LostPlaceError(PlaceError):
    """A machine was lost meanwhile: another attempt may succeed."""


class StarterReports(Protocol):
    """The pool, as starters report to it. All methods are called in the pool's thread."""

    def give_up_wanted(self) -> None:
        """Have the worlds given up, after the running test, whose `Taken.wanted` has become True."""

    def lost_ranks(self, starter: Starter[Any], server: int, loss: str | None) -> None:
        """Note that the fork server `server` of `starter` has ended, and all its ranks with it.

        `loss` is the name of its machine, and the reason why the machine is lost; None if the machine is not lost.
        """

    def report(self, message: ServerReport) -> None:
        """Handle a report of a fork server.

        A `WorldStarted` has the process ids of all ranks, or a problem.
        """


Own = TypeVar("Own", bound=Taken)
"""The type of the object for the devices or CPU slots that a starter takes."""


class LeaseSource(Protocol[Own]):
    """The source of the devices and CPU slots of a starter's worlds: `Leases` on this machine."""

    async def take(self, demand: WorldDemand) -> Own:
        """Wait for the devices or CPU slots of a world, and return them.

        Raise :class:`PlaceError` if that is not possible, or not any more. A cancelled call has taken nothing.
        """

    def waiting(self, demand: WorldDemand) -> tuple[str, list[str]] | None:
        """Return what a call of :meth:`take` waits for; None if there is no such call, or it need not wait.

        The result is a text, such as ``2 sim devices``, and a line for each known reason, such as a device's holder.
        """

    def hand_on(self, taken: Own) -> WorldDemand | None:
        """Give `taken`, which a returned world has, to the first call of :meth:`take` that waits for it.

        Cancel the call, and return its demand, whose request gets the world. Return None, without effect, if the call
        has another key.
        """

    def describe(self, taken: Own, test: str, pids: Sequence[int]) -> None:
        """Tell other sessions which test uses `taken`, in the processes `pids`, by rank."""

    def give_back(self, taken: Own, *, killed: bool) -> None:
        """Give `taken` back, which no process uses any more. `killed` says whether the processes were killed."""


class Starter(Protocol[Own]):
    """A starter. See the module's docstring."""

    @property
    def leases(self) -> LeaseSource[Own]:
        """The source of the devices and CPU slots."""

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of the machines on which ranks may run so far, by number; this machine is the first."""

    def serves(self, key: WorldKey) -> bool:
        """Return whether this starts worlds of `key`; other worlds are started on this machine."""

    def warm(self) -> None:
        """Start what the first world will need. Raise OSError if that is not possible."""

    def keeps(self, key: WorldKey) -> bool:
        """Return whether an idle world of `key` keeps what was taken. It keeps devices; CPU slots belong to a test."""

    def place(self, spec: WorldSpec, taken: Own) -> WorldSpec:
        """Return `spec` with the devices, the machine and the fork server of each rank."""

    def start(self, spec: WorldSpec, taken: Own) -> None:
        """Start the ranks. Raise an error if that is impossible; otherwise a report follows."""

    def kill(self, spec: WorldSpec) -> None:
        """Kill the ranks; reports of their exits follow."""

    def kill_servers(self, spec: WorldSpec) -> None:
        """Kill the processes that should have reported the start or exits of ranks; reports of their ends follow."""

    async def stop(self) -> bool:
        """End all processes that this starter has started; return False if some may live on."""


class ClusterConnection(Protocol):
    """The connection of a session to a cluster."""

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> Starter[Any]:
        """Return the starter of ranks on its machines."""

    @property
    def machine(self) -> Machine:
        """The devices of the cluster, in place of this machine's devices."""

    def close(self) -> None:
        """Disconnect. The pool must have been closed."""


class LocalStarter:
    """The starter of this machine. A fork server that has ended is replaced when the next world is started."""

    def __init__(self, spec: SessionSpec, leases: Leases, spawn: Spawn, reports: StarterReports) -> None:
        """`spawn` starts the fork server."""
        self.leases = leases
        self.machines = (gethostname(),)
        self.spec = spec
        self.spawn = spawn
        self.reports = reports
        self._server: ForkServerClient | None = None

    def serves(self, key: WorldKey) -> bool:
        return True

    def keeps(self, key: WorldKey) -> bool:
        return key.need is not None

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

    def kill(self, spec: WorldSpec) -> None:
        if self._server is not None:
            self._server.kill(spec.world)

    def kill_servers(self, spec: WorldSpec) -> None:
        if self._server is not None:
            self._server.kill_server()

    async def stop(self) -> bool:
        """End the fork server and its ranks; return False if some processes may live on."""
        server, self._server = self._server, None
        return server is None or await server.stop()

    def _server_ended(self, server: int, loss: str | None) -> None:
        self._server = None
        self.reports.lost_ranks(self, server, loss)
