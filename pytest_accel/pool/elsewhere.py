"""Places besides this machine's fork server, on which a session starts ranks, as the kernel knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pytest_accel.core.world_key import WorldKey
from pytest_accel.pool.starter import Own, Starter, StarterReports

if TYPE_CHECKING:
    from pytest_accel.core.launcher_env import LauncherEnv
    from pytest_accel.hardware.inventory import Machine
    from pytest_accel.messages.session_spec import SessionSpec
    from pytest_accel.pool.local_starter import LocalStarter


class PlaceStarter(Starter[Own], Protocol[Own]):
    """A starter of ranks elsewhere: on the machines of the processes of a launcher, or of a cluster."""

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of the machines on which ranks may run so far, by number; this machine is the first."""

    def serves(self, key: WorldKey) -> bool:
        """Return whether this starts worlds of `key`; other worlds are started on this machine."""

    def warm(self) -> None:
        """Start what the first world will need. Raise OSError if that is not possible."""


class Elsewhere(Protocol):
    """Other machines, on which a session starts ranks."""

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> PlaceStarter[Any] | None:
        """Return the starter of ranks on these machines; None if this machine is the only one."""


class Layout(Protocol):
    """The machines of the processes that a launcher has started, the driver's machine first."""

    @property
    def capacity(self) -> int:
        """The maximum number of ranks of a world."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the machines."""

    def shortage(self, ranks: int, machines: int, launcher: str | None) -> str | None:
        """Return why no world of `ranks` ranks on at least `machines` machines is possible, or None if it is."""

    def machines_of(self, ranks: int, machines: int) -> Sequence[int]:
        """Return the machine of each rank of a world for which there is no `shortage`."""


class LaunchedMachines(Elsewhere, Protocol):
    """The machines of the processes that a launcher has started together."""

    @property
    def process(self) -> LauncherEnv:
        """This process, as the launcher has described it."""

    @property
    def layout(self) -> Layout:
        """The machines, with the number of ranks that each can run."""

    @property
    def about(self) -> str:
        """One line about the processes, for the header of the session."""


class ClusterConnection(Elsewhere, Protocol):
    """The connection of a session to a cluster."""

    @property
    def machine(self) -> Machine:
        """The devices of the cluster, in place of this machine's devices."""

    def close(self) -> None:
        """Disconnect. The pool must have been closed."""


JobStarter = Callable[["LocalStarter", str, StarterReports], Starter[Any]]
"""Makes the starter of worlds that a launcher, such as ``mpirun``, starts on this machine."""
