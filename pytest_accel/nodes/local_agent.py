"""The agent of a launched process that is not rank 0, on the driver's node.

The agent runs the fork server from which its ranks are forked, and prints nothing. It is not a rank itself: so the
launcher sees no process end when a rank dies or hangs, and the world can be replaced as without a launcher.
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
"""Exit status of an agent whose driver has ended without sending `End`."""
_POLL_INTERVAL = 0.2
"""Seconds between two checks of the fork server, where the kernel has no pidfd to wait for."""
TIMEOUT = 30.0
"""Seconds that a driver may take to exit after it has sent `End`, and a fork server after the loss of its driver."""


def serve_driver(connection: Connection) -> int:
    """Serve the driver until it ends; return the exit status for this process."""
    # The driver handles a Ctrl-C at the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = _LocalAgent(connection)
    try:
        return agent.run()
    finally:
        agent.close()


def changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment with `changes`; None removes a variable."""
    environment = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    return {name: value for name, value in environment.items() if changes.get(name, "") is not None}


class _LocalAgent:
    """The agent's state: its connection to the driver and its current fork server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._driver: int | None = None
        """A descriptor that becomes readable when the driver ends; None if the kernel has none."""
        self._server: OwnServer | None = None
        self._server_end: int | None = None
        """A descriptor that becomes readable when the server ends; None if the kernel has none."""
        self._number = 0
        self._folder: str | None = None
        """The session's folder."""

    def run(self) -> int:
        """Handle messages until the driver ends; return the exit status."""
        while True:
            ends = [self._server_end] if self._server_end is not None else []
            ready = wait([self._connection, *ends], _POLL_INTERVAL if self._server and not ends else None)
            self._report_server_end()
            if self._connection not in ready:
                continue
            try:
                message = self._connection.recv()
                given = fd_passing.receive(self._connection, 1) if isinstance(message, StartServer) else []
            except (EOFError, OSError):
                self._clean_up_lost()
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
            self._server = OwnServer(message.spec, end, changed_environment(message.environment))
        self._number = message.number
        self._server_end = prctl.end_of(self._server.process.pid)
        self._folder = message.spec.directory

    def _report_server_end(self) -> None:
        """Tell the driver if the fork server has ended."""
        if self._server is not None and self._server.wait(0):
            self._server = None
            if self._server_end is not None:
                os.close(self._server_end)
                self._server_end = None
            with contextlib.suppress(OSError):  # The driver has ended; `run` notices that next.
                self._connection.send(ServerEnded(self._number))

    def _wait_for_driver(self) -> None:
        """Wait until the driver has exited.

        A launcher that sees another exit status than 0 terminates all processes, so the driver's must be the first.
        """
        if self._driver is not None:
            select.select([self._driver], [], [], TIMEOUT)

    def _clean_up_lost(self) -> None:
        """Clean up after the loss of the driver.

        The driver's fork server removes the folder, but ranks of this agent may have written files there since.
        """
        self._end_server()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self._connection.close()
        self._end_server()

    def _end_server(self) -> None:
        if self._server is not None and not self._server.wait(TIMEOUT):
            self._server.kill_tree()
