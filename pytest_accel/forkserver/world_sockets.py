"""The sockets of a world, which exist before its ranks do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

from pytest_accel.core import unix_sockets
from pytest_accel.core.paths import socket_path
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.rank.process_group import StorePort
from pytest_accel.rank.rank_environment import LOOPBACK, host_of, loopback_interface
from pytest_accel.rank.role import Role

_BACKLOG = 128
"""Connections that may wait until a rank accepts them."""
_CONNECT_TIMEOUT = 2.0
"""Seconds in which the loopback interface must connect two sockets; it takes microseconds."""


class NoLoopbackError(OSError):
    """Raised if processes of this machine cannot connect to each other; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class WorldSockets:
    """The sockets that the fork server opens for a world and passes to its ranks."""

    listeners: dict[int, socket.socket]
    """By rank: the socket on which it accepts drivers."""
    store_port: StorePort | None

    @property
    def port(self) -> int | None:
        """The port of the world's store, or None if it has no store."""
        return None if self.store_port is None else self.store_port.port

    def role(self, spec: WorldSpec, rank: int) -> Role:
        """Return the role of `rank`, in a process that has inherited all the sockets; close those of other ranks."""
        for other, listener in self.listeners.items():
            if other != rank:
                listener.close()
        return Role(spec, rank, self.listeners[rank], self.store_port)


@contextmanager
def open_sockets(spec: WorldSpec, session: SessionSpec, port: int | None) -> Iterator[WorldSockets]:
    """Open the sockets of the ranks that this server forks, and close this process's copies at the end of the block.

    `port` is the port of the world's store if another server has created it. Raises OSError, and `NoLoopbackError`
    before ranks would wait for each other.
    """
    with ExitStack() as stack:
        listeners = {
            rank: stack.enter_context(unix_sockets.listen(socket_path(session.directory, spec.world, rank), _BACKLOG))
            for rank in range(spec.ranks)
            if spec.server_of(rank) == session.server
        }
        store = None
        if spec.grouped and port is None:
            if host_of(spec) == LOOPBACK:
                _check_loopback()
            store = stack.enter_context(_reserve_port(host_of(spec)))
            port = store.getsockname()[1]
        yield WorldSockets(listeners, None if port is None else StorePort(port, store))


def _reserve_port(address: str) -> socket.socket:
    """Return a listening socket on a free port of `address`.

    The world keeps the socket until it ends, so that no other process can take the port.
    """
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    held.bind((address, 0))
    held.listen(1024)
    return held


@cache
def _check_loopback() -> None:
    """Raise `NoLoopbackError` if no connection to `LOOPBACK` is possible: torch would try for minutes."""
    with socket.socket() as listener, socket.socket() as caller:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        caller.settimeout(_CONNECT_TIMEOUT)
        try:
            caller.connect(listener.getsockname())
        except OSError as error:
            raise NoLoopbackError(
                f"the loopback interface {loopback_interface()} is down, or its connections are blocked: {LOOPBACK} "
                f"cannot be reached ({error.strerror or error}); the ranks of a process group need it "
                "(ip link set lo up)"
            ) from None
