"""A launched process that is not rank 0: it keeps the fork server that its ranks come from, and says nothing.

It is no rank itself: a rank that dies or hangs then ends no process that the launcher watches, and the world can be
replaced as anywhere else.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait

from pytest_accel.core import fd_passing, prctl
from pytest_accel.forkserver.server_client import OwnServer
from pytest_accel.nodes.agent_messages import End, KillServer, ServerEnded, StartServer, Welcome

LOST = 1
"""Exit status of a keeper whose driver has gone without a word."""
_LOOK = 0.2
"""Seconds between two looks at processes of which the kernel does not tell."""
PATIENCE = 30.0
"""Seconds that a driver may take from its last word to its end, and a fork server from the loss of its driver."""


def keep(connection: Connection) -> int:
    """Obey the driver until it ends; gives its exit status."""
    # A Ctrl-C at the terminal is the driver's to hear.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keeper = _Keeper(connection)
    try:
        return keeper.obey()
    finally:
        keeper.close()


def changed(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with `changes`; None: removed."""
    environment = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    return {name: value for name, value in environment.items() if changes.get(name, "") is not None}


class _Keeper:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._driver: int | None = None
        """A descriptor that is readable when the driver has ended."""
        self._server: OwnServer | None = None
        self._server_end: int | None = None
        """A descriptor that is readable when the server has ended."""
        self._number = 0
        self._folder: str | None = None
        """The session's."""

    def obey(self) -> int:
        while True:
            ends = [self._server_end] if self._server_end is not None else []
            ready = wait([self._connection, *ends], _LOOK if self._server and not ends else None)
            self._look()
            if self._connection not in ready:
                continue
            try:
                message = self._connection.recv()
                given = fd_passing.receive(self._connection, 1) if isinstance(message, StartServer) else []
            except (EOFError, OSError):
                self._be_lost()
                return LOST
            if isinstance(message, Welcome):
                self._driver = prctl.end_of(message.pid)
            elif isinstance(message, StartServer):
                self._start(message, *given)
            elif isinstance(message, KillServer):
                if self._server is not None and message.number == self._number:
                    self._server.kill_tree()
            elif isinstance(message, End):
                self._wait_for_driver()
                return message.status

    def _start(self, message: StartServer, descriptor: int) -> None:
        with socket.socket(fileno=descriptor) as end:
            self._server, self._number = OwnServer(message.spec, end, changed(message.environment)), message.number
        self._server_end = prctl.end_of(self._server.process.pid)
        self._folder = message.spec.directory

    def _look(self) -> None:
        """Tell the driver of a fork server that has ended."""
        if self._server is not None and self._server.wait(0):
            self._server = None
            if self._server_end is not None:
                os.close(self._server_end)
                self._server_end = None
            with contextlib.suppress(OSError):  # The driver is gone, which is found next.
                self._connection.send(ServerEnded(self._number))

    def _wait_for_driver(self) -> None:
        """Its exit status is the first: a launcher that sees one that is not 0 ends all that it has started."""
        if self._driver is not None:
            select.select([self._driver], [], [], PATIENCE)

    def _be_lost(self) -> None:
        """The driver's fork server removes the folder; what a rank of this one's has written meanwhile is left."""
        self._end_server()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self._connection.close()
        self._end_server()

    def _end_server(self) -> None:
        if self._server is not None and not self._server.wait(PATIENCE):
            self._server.kill_tree()
