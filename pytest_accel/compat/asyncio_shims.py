"""An event loop that works in processes whose suite has replaced functions of the standard library.

`BaseEventLoop.time` looks up `time.monotonic`, which suites freeze, and `BaseSelectorEventLoop._make_self_pipe` makes
sockets of `socket.socket`, which suites replace to forbid tests the network. asyncio has no public way to replace them.
"""

from __future__ import annotations

import asyncio
from selectors import DefaultSelector
from typing import Any

from pytest_accel.core.clock import monotonic
from pytest_accel.messages import unix_sockets


class GuardedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time no suite can stop, and whose sockets no suite can forbid."""

    def __init__(self) -> None:
        super().__init__(DefaultSelector())

    def time(self) -> float:
        return monotonic()

    def _make_self_pipe(self) -> None:
        # If a future asyncio does not call this, a suite without sockets gets an error at its first marked test.
        loop: Any = self
        loop._ssock, loop._csock = unix_sockets.pair(blocking=False)
        loop._internal_fds += 1
        loop._add_reader(loop._ssock.fileno(), loop._read_from_self)
