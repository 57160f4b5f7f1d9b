"""Processes that wait to become ranks, so that a world need not wait for a fork and for pytest to load its own plugins.

They have what the fork server has imported, and have seen nothing of the environment that makes a process a rank: no
other plugin has been registered, no conftest read. A rank that was a spare is as new as any.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from os import _exit

import psutil

from pytest_accel.core import fd_passing
from pytest_accel.core.clock import monotonic
from pytest_accel.core.messages import WorldSpec
from pytest_accel.rank.process_group import Meeting
from pytest_accel.rank.role import Role
from pytest_accel.rank.run_ahead import Peers, ends_of, take

_FEWEST, _MOST = 2, 8
_REST = 0.1
"""Seconds after which spares are made: the ranks of the world that has been started are not kept from the processor."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """What the fork server holds of a world that it starts."""

    listeners: dict[int, socket.socket]
    pairs: Sequence[tuple[socket.socket, socket.socket]]
    meeting: Meeting | None

    def role(self, spec: WorldSpec, rank: int) -> Role:
        """That of `rank`, in a process which has inherited all of it, and keeps what is its own."""
        for other, listener in self.listeners.items():
            if other != rank:
                listener.close()
        return Role(spec, rank, self.listeners[rank], take(rank, self.pairs), self.meeting)


class Spares:
    """The spares of a fork server."""

    def __init__(self, fork: Callable[[Callable[[], Role]], int]) -> None:
        """`fork` makes a process that becomes a rank once the function it is given has said which."""
        self.due: float | None = None
        """When one is to be made (`clock.monotonic`); None: not before the next world."""
        self._fork = fork
        self._waiting: dict[int, Connection] = {}
        self._missing = 0
        """How many are still to be made; one that cannot be made, or dies, is not made once more."""
        self._worlds = 0

    def stock_up(self, ranks: int) -> None:
        """A world of so many `ranks` has been started: have as many spares, if it is not this server's first one."""
        self._worlds += 1
        if self._worlds > 1:
            self._missing = max(_FEWEST, min(ranks, _MOST)) - len(self._waiting)
            self.due = monotonic() + _REST

    def add_if_due(self) -> None:
        """Make one, if it is time to; nothing depends on whether that succeeds."""
        if self.due is None or monotonic() < self.due:
            return
        if self._missing > 0:
            self._missing -= 1
            with suppress(OSError):  # As where there may be no more processes.
                self._add()
        else:
            self.due = None

    def _add(self) -> None:
        with ExitStack() as stack:
            ours, theirs = map(stack.enter_context, Pipe())

            def wait() -> Role:
                ours.close()
                return _receive(theirs)

            self._waiting[self._fork(wait)] = ours
            stack.pop_all()
            theirs.close()

    def give(self, spec: WorldSpec, rank: int, sockets: Sockets) -> int | None:
        """Have one of them be `rank`; its process id, or None where there is none."""
        meeting = sockets.meeting
        held = meeting.listening if meeting is not None and rank == 0 else None
        ends = [sockets.listeners[rank], *ends_of(rank, sockets.pairs), *([held] if held is not None else [])]
        said = (spec, rank, len(ends), None if meeting is None else meeting.port, held is not None)
        while self._waiting:
            pid: int = next(iter(self._waiting))  # It has waited longest: pytest has loaded what it can.
            connection = self._waiting.pop(pid)
            if _is_stopped(pid):
                os.kill(pid, signal.SIGKILL)
                connection.close()
                continue
            # In a file, which is there at once: a process that does not read must not keep this one from its work.
            with connection, suppress(OSError), open(os.memfd_create("role"), "wb") as file:
                pickle.dump(said, file)
                file.flush()
                # It may have died, or be sent more than goes into a message.
                fd_passing.send(connection, [file.fileno()])
                fd_passing.send(connection, [end.fileno() for end in ends])
                return pid
        return None

    def forget(self, pid: int) -> None:
        """A process has ended, which may have been one of them."""
        if (connection := self._waiting.pop(pid, None)) is not None:
            connection.close()

    def dismiss(self) -> None:
        """Have them end; in a copy of this process, let go of them."""
        for connection in self._waiting.values():
            connection.close()
        self._waiting.clear()


def _is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP) or a debugger has stopped the process, which would not start its world."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _receive(connection: Connection) -> Role:
    with connection:
        try:
            [told] = fd_passing.receive(connection, 1)
            with open(told, "rb") as file:
                file.seek(0)  # Both processes have the sender's position.
                spec, rank, count, port, holds = pickle.load(file)
            ends = [socket.socket(fileno=descriptor) for descriptor in fd_passing.receive(connection, count)]
        except (EOFError, OSError):
            _exit(0)  # It is not wanted any more.
    held = ends.pop() if holds else None
    listener, *others = ends
    meeting = None if port is None else Meeting(port, held)
    return Role(spec, rank, listener, Peers(rank, others[0] if others else None, others[1:]), meeting)
