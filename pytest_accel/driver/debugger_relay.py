"""Which rank's debugger gets the driver's terminal, and how it is handed over."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

from pytest_accel.core.clock import monotonic

Terminal = Callable[[int], AbstractContextManager[tuple[int, int]]]
"""The driver's terminal, free while the context lasts, for the process of this id: descriptors to read and to write."""

Call = Callable[[], socket.socket]
"""Makes a connection to a rank; OSError where it is gone."""


class Lending:
    """The debuggers of one world's ranks."""

    def __init__(self, terminal: Terminal | None, ranks: int, wanted: int | None) -> None:
        """`wanted` is the only rank to be debugged; None: the first that asks. Without a `terminal`, none is."""
        self._terminal = terminal
        self._wanted = wanted if wanted is not None and wanted < ranks else None
        self._asking: list[tuple[int, str]] = []
        self._first: int | None = None
        self.holder: int | None = None
        self.ended = 0.0
        """When the last debugger came to its end (`clock.monotonic`): clocks that were stopped begin anew."""

    def begin(self) -> None:
        """Another test begins."""
        self._asking.clear()
        self._first = None

    def ask(self, rank: int, method: str) -> None:
        """A debugger wants to start in `rank`, which waits for the answer."""
        self._asking.append((rank, method))

    def serve(self, place: Callable[[int], tuple[int | None, Call]], wait: Callable[[], bool]) -> bool:
        """Answer the ranks that have asked; whether one did.

        `place` gives a rank's process, None where that is on another machine, and a way to call it. While a rank has
        the terminal, `wait` takes in what comes, and says whether that rank is still there.
        """
        if not self._asking:
            return False
        rank, method = min(self._asking, key=lambda asked: asked[0] != self._chosen(*asked))
        self._asking.remove((rank, method))
        pid, call = place(rank)
        if self._terminal is None or pid is None or self._chosen(rank, method) != rank:
            _answer(call, ())
            return True
        self._first = rank
        with self._terminal(pid) as (source, target):
            self.holder = rank
            if _answer(call, (source, target)):
                while wait():
                    pass
            self.holder = None
        self.ended = monotonic()
        return True

    def _chosen(self, rank: int, method: str) -> int:
        """The rank whose turn it is if `rank` asks: every rank comes to the start of a test that is traced."""
        if self._wanted is not None:
            return self._wanted
        if method == "runcall":
            return 0
        return rank if self._first is None else self._first


def _answer(reach: Call, descriptors: tuple[int, ...]) -> bool:
    """Tell the rank; whether it was there."""
    with contextlib.suppress(OSError), reach() as call:
        if descriptors:
            socket.send_fds(call, [b"y"], descriptors)
        else:
            call.sendall(b"n")
        return True
    return False
