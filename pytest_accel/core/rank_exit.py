"""Why the process of a rank has ended: data, which `diagnostics.exit_status` puts into words."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class ExitCause(Enum):
    """What has ended the process of a rank."""

    EXITED = "exited"
    """The process itself or a signal; the status says which."""
    OUT_OF_MEMORY = "out of memory"
    """The kernel, because memory ran out."""
    SERVER_ENDED = "server ended"
    """The end of its fork server."""
    NODE_LOST = "node lost"
    """Unknown: its node does not answer any more."""
    JOB_ENDED = "job ended"
    """The end of its MPI job."""
    LOCK_LOST = "lock lost"
    """This session, since another session may have the rank's devices."""


class RankExit(NamedTuple):
    """The end of the process of a rank."""

    cause: ExitCause
    status: int | None = None
    """Exit code, or the negative number of the signal (as in `subprocess`); None if it is unknown."""


def exited(status: int) -> RankExit:
    """Return the exit of a process that has ended by itself or by a signal, with `status`."""
    return RankExit(ExitCause.EXITED, status)
