"""The other launched processes of a session on one machine, which wait for the end of rank 0's session.

Rank 0 starts all ranks, so they have nothing else to do. A process that ends before is noticed, and ends the session.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress

from pytest_accel.core import processes, threads
from pytest_accel.core.log import step
from pytest_accel.features.launchers.agent_messages import End
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection

DRIVER_LOST = 1
"""Exit status of a process whose driver has exited without sending `End`."""
EXIT_TIMEOUT = 30.0
"""Seconds that a driver may take to exit after it has sent `End`."""


class WaitingProcess:
    """Rank 0's end of the connection to a waiting process."""

    machine_loss = None
    """Always None: the process is on this machine."""

    def __init__(self, connection: Connection, on_lost: Callable[[], None]) -> None:
        """`on_lost` is called in a thread of this object when the connection has ended."""
        self.lost = False
        """True if the connection has ended."""
        self._connection = connection
        self._on_lost = on_lost
        threads.start(self._watch, "accel-launched")

    def _watch(self) -> None:
        with suppress(EOFError, OSError):
            self._connection.recv_bytes()
        self.lost = True
        self._on_lost()

    def end(self, status: int) -> None:
        """Have the process exit with `status`."""
        with suppress(OSError):  # It has ended.
            self._connection.send_bytes(encode(End(status, os.getpid())))


def wait_for_end(driver: Connection) -> int:
    """Wait until the driver has exited; return the exit status for this process."""
    ignore_interrupts()
    step("waits for the end of the session")
    try:
        end: End = decode(driver.recv_bytes(), End)
    except (EOFError, OSError):
        step("the connection to the driver has ended")
        return DRIVER_LOST
    step("the driver ends with status %d", end.status)
    # The driver exits first: a launcher that sees another exit status than 0 terminates all processes. Its connection
    # ends before the launcher can see its exit status.
    if (exit := processes.end_of(end.driver)) is not None:
        select.select([exit], [], [], EXIT_TIMEOUT)
        os.close(exit)
    return end.status


def ignore_interrupts() -> None:
    """Ignore Ctrl-C, which the driver handles. Ranks would inherit that a signal is ignored, but no handler."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)


def own_cores() -> tuple[int, ...]:
    """Return the CPU cores that the launcher lets this process use; empty if this is not known."""
    return tuple(sorted(os.sched_getaffinity(0))) if sys.platform == "linux" else ()


def use_cores(cores: Collection[int]) -> None:
    """Use these CPU cores in this process and in its ranks; no-op if there are none.

    One process starts all ranks of a machine, and mpirun binds each process that it starts to a core of its own.
    """
    if sys.platform == "linux" and cores:
        with suppress(OSError):  # None of them is present, in a container.
            os.sched_setaffinity(0, cores)
