"""Why the process of a rank has ended: data, which `verdict.sentences` puts into words."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from pytest_accel.core.signals import is_crash


class ExitCause(Enum):
    """The causes for which the process of a rank ends."""

    EXITED = "exited"
    """The process exited, or a signal killed it; the status says which."""
    OUT_OF_MEMORY = "out of memory"
    """The kernel killed the process, because memory ran out."""
    SERVER_ENDED = "server ended"
    """The fork server of the process ended."""
    MACHINE_LOST = "machine lost"
    """The machine of the process is lost; what happened to the process is unknown."""
    JOB_ENDED = "job ended"
    """The MPI job of the process ended."""
    LOCK_LOST = "lock lost"
    """This session killed the process, since another session may have its devices."""


class RankExit(NamedTuple):
    """The end of the process of a rank."""

    cause: ExitCause
    status: int | None = None
    """Exit code, or the negative number of the signal (as in `subprocess`); None if it is unknown."""
    about: str = ""
    """Details on the cause: for a lost machine, its name and why it counts as lost."""

    @property
    def is_crash(self) -> bool:
        """True if the process was killed by a signal for which faulthandler first writes the stacks."""
        return self.cause is ExitCause.EXITED and self.status is not None and is_crash(-self.status)


def exited(status: int) -> RankExit:
    """Return the exit of a process that has ended by itself or by a signal, with `status`."""
    return RankExit(ExitCause.EXITED, status)
