"""The driver's side of debuggers in ranks: one rank at a time gets the terminal, which this process lends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from os import isatty, kill
from signal import SIGINT, signal
from socket import send_fds
from termios import TCSADRAIN, tcgetattr, tcsetattr

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.driver.link_to_rank import LinkToRank
from pytest_accel.messages.unix_sockets import sendall

Terminal = Callable[[int], AbstractContextManager[tuple[int, int]]]
"""Lends the driver's terminal to the process with the given id while the context lasts: input and output descriptor."""


class DebuggerRelay:
    """Requests of one world's ranks for the driver's terminal. Owned by the driver's `World`."""

    def __init__(self, terminal: Terminal | None, ranks: int, only_rank: int | None) -> None:
        """Only the rank `only_rank` may debug, or the first that asks if it is None. Without a `terminal`, none may."""
        self._terminal = terminal
        self._only_rank = only_rank if only_rank is not None and only_rank < ranks else None
        self._requests: list[tuple[int, str]] = []
        self._first: int | None = None
        """The rank that got the terminal first in the running test."""
        self._holder: int | None = None
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

    def release(self) -> None:
        """Take the terminal from the rank that has it."""
        self._holder = None

    def serve(self, ranks: Sequence[LinkToRank], wait: Callable[[], object]) -> bool:
        """Answer one request of `ranks`; return False if there is none.

        `wait` handles the next message. It is called until the rank that got the terminal has ended or released it.
        """
        if not self._requests:
            return False
        number, method = min(self._requests, key=lambda request: request[0] != self._chosen(*request))
        self._requests.remove((number, method))
        rank = ranks[number]
        if self._terminal is None or rank.is_remote or self._chosen(number, method) != number:
            _answer(rank, ())
            return True
        self._first = number
        with self._terminal(rank.pid) as (source, target):
            self._holder = number
            if _answer(rank, (source, target)):
                while self._holder == number and rank.end is None:
                    wait()
            self._holder = None
        self.ended = monotonic()
        return True

    def _chosen(self, rank: int, method: str) -> int:
        """Return the rank that may debug when `rank` asks."""
        if self._only_rank is not None:
            return self._only_rank
        if method == "runcall":
            return 0  # With --trace every rank asks, in any order.
        return rank if self._first is None else self._first


def _answer(rank: LinkToRank, descriptors: tuple[int, ...]) -> bool:
    """Send `rank` the terminal's `descriptors`, or a refusal if there are none; return False if the rank is gone."""
    with suppress(OSError), rank.call() as connection:
        if descriptors:
            send_fds(connection, [b"y"], descriptors)
        else:
            sendall(connection, b"n")
        return True
    return False


@contextmanager
def lend_terminal(config: pytest.Config, pid: int) -> Iterator[tuple[int, int]]:
    """Yield the descriptors of this process's input and output for the process `pid`, and forward Ctrl-C to it.

    `pytest_enter_pdb` and `pytest_leave_pdb` are called, so that plugins with timeouts suspend them.
    """

    def forward(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            kill(pid, SIGINT)

    with ExitStack() as undo:
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:  # None with `-p no:capture`.
            undo.callback(capture.resume)
            capture.suspend(in_=True)
        sys.stdout.flush()
        if isatty(0):
            # A rank that died in its line editor may have left the terminal in raw mode.
            undo.callback(tcsetattr, 0, TCSADRAIN, tcgetattr(0))
        undo.callback(config.hook.pytest_leave_pdb, config=config, pdb=None)
        config.hook.pytest_enter_pdb(config=config, pdb=None)
        undo.callback(signal, SIGINT, signal(SIGINT, forward))
        yield 0, 1
