"""Places besides this machine's fork server, on which a session starts ranks, as the kernel knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from pytest_accel.core.world_key import WorldKey
from pytest_accel.pool.starter import Own, Starter, StarterReports

if TYPE_CHECKING:
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


class ClusterConnection(Elsewhere, Protocol):
    """The connection of a session to a cluster."""

    @property
    def machine(self) -> Machine:
        """The devices of the cluster, in place of this machine's devices."""

    def close(self) -> None:
        """Disconnect. The pool must have been closed."""


JobStarter = Callable[["LocalStarter", str, StarterReports], Starter[Any]]
"""Makes the starter of worlds that a launcher, such as ``mpirun``, starts on this machine."""
