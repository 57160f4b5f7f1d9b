"""A rank's side of the connection to a driver: receives requests, and sends reports and results."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection
from os import _exit, getpid
from pickle import dumps
from socket import socket

import pytest

from pytest_accel.core import unix_sockets
from pytest_accel.core.rank_messages import ForkReturned, Retire, RunTest


class DriverConnection:
    """The connection to one driver, which uses this rank until it closes the connection."""

    def __init__(self, listener: socket) -> None:
        """Wait until a driver connects to `listener`."""
        self._connection = Connection(unix_sockets.accept(listener).detach())
        self._pid = getpid()
        self._queue: list[object] = []
        """Messages to send together with the next one, so that a test that passes sends one message only."""

    def receive(self) -> RunTest | Retire:
        """Return the driver's next request; raise EOFError or OSError if the driver has closed the connection."""
        request: RunTest | Retire = self._connection.recv()
        return request

    def queue(self, message: object) -> None:
        """Send `message` together with the next one that is sent."""
        self._queue.append(message)

    def send(self, *messages: object) -> None:
        """Send the queued messages and `messages`, unless the driver has exited."""
        self.exit_if_forked()
        queued, self._queue = self._queue, []
        with suppress(OSError):  # The driver has exited, or the pool has connected only to retire this rank.
            self._connection.send_bytes(dumps((*queued, *messages)))

    def close(self) -> None:
        """Close the connection. Messages that are sent afterwards are dropped."""
        self._connection.close()

    def exit_if_forked(self, report: pytest.TestReport | None = None) -> None:
        """Exit in a process that the test forked and that has returned from the test; no-op in the rank itself.

        `report` is the report that this process was about to send.
        """
        if getpid() == self._pid:
            return
        failure = report.longreprtext if report is not None else ""
        text = f"a process that it had forked has returned from the test\n{failure}"
        phase = "call" if report is None or report.when is None else report.when
        with suppress(OSError):
            self._connection.send_bytes(dumps((ForkReturned(text, phase),)))
        _exit(1)
