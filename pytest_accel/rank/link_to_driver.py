"""A rank's end of the link to a driver: gets requests, and sends reports. The other end: `driver/link_to_rank.py`."""

from __future__ import annotations

from contextlib import suppress
from os import _exit, getpid
from socket import socket

import pytest

from pytest_accel.messages import unix_sockets
from pytest_accel.messages.rank_messages import DriverRequest, ForkReturned, RankMessage
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection


class LinkToDriver:
    """The link to one driver, which uses this rank until it closes the link."""

    def __init__(self, listener: socket) -> None:
        """Wait until a driver connects to `listener`."""
        self._connection = Connection(unix_sockets.accept(listener).detach())
        self._pid = getpid()

    def receive(self) -> DriverRequest:
        """Return the driver's next request; raise EOFError or OSError if the driver has closed the connection."""
        request: DriverRequest = decode(self._connection.recv_bytes(), DriverRequest)
        return request

    def send(self, *messages: RankMessage) -> None:
        """Send `messages` together, unless the driver has exited."""
        self.exit_if_forked()
        with suppress(OSError):  # The driver has exited, or the pool has connected only to retire this rank.
            self._connection.send_bytes(encode(messages))

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
            self._connection.send_bytes(encode((ForkReturned(text, phase),)))
        _exit(1)
