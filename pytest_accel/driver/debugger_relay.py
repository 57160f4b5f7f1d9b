"""Lends the driver's terminal to one rank's debugger at a time."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

from pytest_accel.core.clock import monotonic

Terminal = Callable[[int], AbstractContextManager[tuple[int, int]]]
"""Lends the driver's terminal to the process with the given id while the context lasts: input and output descriptor."""

Connect = Callable[[], socket.socket]
"""Connects to a rank. Raises OSError if the rank is gone."""


class DebuggerRelay:
    """Requests of one world's ranks for the driver's terminal. Owned by the driver's `World`."""

    def __init__(self, terminal: Terminal | None, ranks: int, only_rank: int | None) -> None:
        """Only the rank `only_rank` may debug; None: the first that asks. Without a `terminal`, no rank may."""
        self._terminal = terminal
        self._only_rank = only_rank if only_rank is not None and only_rank < ranks else None
        self._requests: list[tuple[int, str]] = []
        self._first: int | None = None
        """The rank that got the terminal first in the running test."""
        self.holder: int | None = None
        """The rank that has the terminal now."""
        self.ended = 0.0
        """Time at which the last debugger ended (`clock.monotonic`). Timeouts count from then at the earliest."""

    def begin(self) -> None:
        """Forget the requests of the previous test."""
        self._requests.clear()
        self._first = None

    def ask(self, rank: int, method: str) -> None:
        """Queue the request of `rank`, which waits for the answer, to start a debugger by pytest's `method`."""
        self._requests.append((rank, method))

    def serve(self, locate: Callable[[int], tuple[int | None, Connect]], wait: Callable[[], bool]) -> bool:
        """Answer one request; return False if there is none.

        `locate` returns the process id of a rank (None if the rank is on another machine) and a function that connects
        to it. While a rank has the terminal, `wait` is called until it returns False: it handles messages, and returns
        whether that rank lives and still has the terminal.
        """
        if not self._requests:
            return False
        rank, method = min(self._requests, key=lambda request: request[0] != self._chosen(*request))
        self._requests.remove((rank, method))
        pid, connect = locate(rank)
        if self._terminal is None or pid is None or self._chosen(rank, method) != rank:
            _answer(connect, ())
            return True
        self._first = rank
        with self._terminal(pid) as (source, target):
            self.holder = rank
            if _answer(connect, (source, target)):
                while wait():
                    pass
            self.holder = None
        self.ended = monotonic()
        return True

    def _chosen(self, rank: int, method: str) -> int:
        """Return the rank that may debug when `rank` asks."""
        if self._only_rank is not None:
            return self._only_rank
        if method == "runcall":
            return 0  # With --trace every rank asks, in any order.
        return rank if self._first is None else self._first


def _answer(connect: Connect, descriptors: tuple[int, ...]) -> bool:
    """Send a rank the terminal's `descriptors`, or a refusal if there are none; return False if the rank is gone."""
    with contextlib.suppress(OSError), connect() as connection:
        if descriptors:
            socket.send_fds(connection, [b"y"], descriptors)
        else:
            connection.sendall(b"n")
        return True
    return False
