"""Standby processes: forked processes that wait to become ranks.

A world with standby processes starts faster: it does not wait for a fork, nor for pytest to load its own plugins. On
two busy cores, a test with ``fresh=True`` takes 0.73 of the time, and the session no more CPU time
(`benchmarks/README.md`).

A standby process has only the fork server's imports and pytest's own plugins. It has not registered other plugins, read
a conftest, or set the environment of a rank, so a rank that was a standby process is in the same state as a newly
forked one.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from os import _exit

import psutil

from pytest_accel.core import fd_passing
from pytest_accel.core.clock import monotonic
from pytest_accel.core.role import Role, StorePort
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.forkserver.forked_worlds import WorldSockets
from pytest_accel.forkserver.server_messages import BecomeRank, file_with, read_file

_FEWEST, _MOST = 2, 8
"""Numbers of standby processes; between these, as many as the last world has ranks."""
_DELAY = 0.1
"""Seconds between the start of a world and these forks, which would slow down the start of its ranks."""


class StandbyProcesses:
    """The standby processes of a fork server."""

    def __init__(self, directory: str, fork: Callable[[Callable[[], Role]], int]) -> None:
        """`fork` forks a process, which calls the given function to wait for its role, and returns the process id.

        `directory` is the session's folder.
        """
        self.due: float | None = None
        """Time of the next fork (`clock.monotonic`); None: not before the next world."""
        self._directory = directory
        self._fork = fork
        self._waiting: dict[int, Connection] = {}
        self._missing = 0
        """Number of forks still to be made. One that fails is not retried, and a dead process is not replaced."""
        self._worlds = 0
        """Number of worlds that this server has started."""

    def pids(self) -> frozenset[int]:
        """Return the process ids of the standby processes."""
        return frozenset(self._waiting)

    def prepare(self, ranks: int) -> None:
        """Plan the forks for the next world, after one with this number of `ranks` has started.

        Plan none after the server's first world: many sessions need only one.
        """
        self._worlds += 1
        if self._worlds > 1:
            self._missing = max(_FEWEST, min(ranks, _MOST)) - len(self._waiting)
            self.due = monotonic() + _DELAY

    def add_if_due(self) -> None:
        """Fork one process if one is due. A failure is ignored: worlds start without standby processes, too."""
        if self.due is None or monotonic() < self.due:
            return
        if self._missing > 0:
            self._missing -= 1
            with suppress(OSError):  # For example, the limit of processes is reached.
                self._add()
        else:
            self.due = None

    def _add(self) -> None:
        with ExitStack() as stack:
            ours, theirs = map(stack.enter_context, Pipe())

            def wait() -> Role:
                ours.close()
                return _receive_role(theirs)

            self._waiting[self._fork(wait)] = ours
            stack.pop_all()
            theirs.close()

    def assign(self, spec: WorldSpec, rank: int, sockets: WorldSockets) -> int | None:
        """Make a standby process the rank `rank`; return its process id, or None if there is none."""
        store_port = sockets.store_port
        held = store_port.listening if store_port is not None and rank == 0 else None
        ends = [sockets.listeners[rank], *([held] if held is not None else [])]
        message = BecomeRank(spec, rank, sockets.port, held is not None)
        while self._waiting:
            # The oldest process, in which pytest has most likely loaded its plugins.
            pid: int = next(iter(self._waiting))
            connection = self._waiting.pop(pid)
            if _is_stopped(pid):
                os.kill(pid, signal.SIGKILL)
                connection.close()
                continue
            # Sending the role in a file does not block: a process that does not read must not stop the server.
            with connection, suppress(OSError), file_with(message, self._directory) as file:
                # Raises OSError if the process has died.
                fd_passing.send(connection, [file.fileno()])
                fd_passing.send(connection, [end.fileno() for end in ends])
                return pid
        return None

    def forget(self, pid: int) -> None:
        """Remove the exited process `pid`; no-op if it is no standby process."""
        if (connection := self._waiting.pop(pid, None)) is not None:
            connection.close()

    def dismiss(self) -> None:
        """Close the connections to all processes, which then exit. A fork of the server closes its copies only."""
        for connection in self._waiting.values():
            connection.close()
        self._waiting.clear()


def _is_stopped(pid: int) -> bool:
    """Return True if a signal (SIGSTOP) or a debugger has stopped the process, so that it cannot become a rank."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _receive_role(connection: Connection) -> Role:
    """Wait for the role of this standby process; exit if the server closes the connection."""
    with connection:
        try:
            message: BecomeRank = read_file(*fd_passing.receive(connection, 1))
            count = 2 if message.holds_store else 1
            ends = [socket.socket(fileno=descriptor) for descriptor in fd_passing.receive(connection, count)]
        except (EOFError, OSError):
            _exit(0)
    store = ends.pop() if message.holds_store else None
    store_port = None if message.port is None else StorePort(message.port, store)
    return Role(message.spec, message.rank, ends[0], store_port)
