"""A rank's side of the connection to a driver: receives requests, and sends reports and results."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection
from os import _exit, getpid
from pickle import dumps
from socket import socket

import pytest

from pytest_accel.core import unix_sockets
from pytest_accel.core.rank_messages import Finished, ForkReturned, Retire, RunTest
from pytest_accel.rank.run_ahead import PeerChannel


class DriverConnection:
    """The connection to one driver, which uses this rank until it closes the connection."""

    def __init__(self, listener: socket, peers: PeerChannel) -> None:
        """Wait until a driver connects to `listener`. `peers` connects to the other ranks."""
        self._connection = Connection(unix_sockets.accept(listener).detach())
        self._peers = peers
        self._pid = getpid()
        self._next_request: RunTest | None = None
        """A request that was received before the one that precedes it had begun."""
        self._queue: list[object] = []
        """Messages to send together with the next one, so that a test that passes sends one message only."""

    def receive(self, *, announced: bool) -> RunTest | Retire:
        """Return the driver's next request; if the test was sent ahead, wait until it may begin.

        `announced` is True if this rank has told its peers that it has passed the last test. Raise EOFError or OSError
        if the driver has closed the connection.
        """
        message: RunTest | Retire
        message, self._next_request = self._next_request or self._connection.recv(), None
        while isinstance(message, RunTest) and message.ahead:
            if announced and self._peers.wait_for_agreement(self._connection):
                return message
            newer = self._connection.recv()
            if isinstance(newer, RunTest) and newer.ahead:
                # The driver sends the test after the next one only when it knows that all ranks have passed. So the
                # next one may begin, although not all messages of the peers have arrived.
                self._next_request = newer
                return message
            message = newer
        return message

    def queue(self, message: object) -> None:
        """Send `message` together with the next one that is sent."""
        self._queue.append(message)

    def send(self, *messages: object) -> None:
        """Send the queued messages and `messages`, unless the driver has exited."""
        self.exit_if_forked()
        queued, self._queue = self._queue, []
        with suppress(OSError):  # The driver has exited, or the pool has connected only to retire this rank.
            self._connection.send_bytes(dumps((*queued, *messages)))

    def finish(self, test: int, finished: Finished) -> None:
        """Send the result of the world's test number `test`, and first announce to the peers that it has passed."""
        if finished.checksum is not None:
            self._peers.announce(test, finished.checksum)
        self.send(finished)

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
