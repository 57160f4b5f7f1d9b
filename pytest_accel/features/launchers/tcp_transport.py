"""Both ends of the connection between the driver and an agent on another node: a :class:`TcpMux`."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from msgspec import structs

from pytest_accel.core import prctl, unix_sockets
from pytest_accel.core.connect import InspectorTarget, RankTarget, ServerTarget
from pytest_accel.core.paths import agent_path, socket_path
from pytest_accel.diagnostics.inspector import answer
from pytest_accel.features.launchers.agent_messages import StartServer
from pytest_accel.features.launchers.greeting import AuthenticatedLink
from pytest_accel.features.launchers.tcp_mux import StreamSocket, TcpMux

_FLUSH_TIMEOUT = 2.0
"""Seconds to wait until the last message has been sent."""


class TcpClientTransport:
    """The driver's end of a connection; its `AgentClient` owns it."""

    def __init__(self, link: AuthenticatedLink) -> None:
        self._mux = TcpMux(link.socket, key=link.key, first=0, open_stream=_nothing_here)
        self.send = self._mux.send
        self.run = self._mux.run
        self._token: str | None = None
        # If a test forks this process, the child must not keep the connection open after this process has ended.
        os.register_at_fork(after_in_child=self._mux.close_in_child)

    def start_server(self, message: StartServer, end: socket.socket) -> None:
        self._mux.listen(agent_path(message.spec.directory, message.spec.server))
        self.send(structs.replace(message, token=self._leave_token(message.spec.basetemp)))
        self._mux.join(end.dup(), ServerTarget())

    def _leave_token(self, basetemp: str) -> str:
        """Return the path of a file in `basetemp` by which the agent finds out if the two share a file system."""
        if self._token is None:
            os.makedirs(basetemp, mode=0o700, exist_ok=True)
            self._token = os.path.join(basetemp, f"accel-shared-{secrets.token_hex(8)}")
            with open(self._token, "w", encoding="utf-8"):
                pass
        return self._token

    def finish(self) -> None:
        self._mux.flush(_FLUSH_TIMEOUT)
        if self._token is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._token)

    def close(self) -> None:
        """End the connection."""
        self._mux.end_after(0.0)


def _nothing_here(target: object) -> StreamSocket:
    """Raise FileNotFoundError: the driver has no targets for streams."""
    raise FileNotFoundError(target)


class TcpAgentTransport:
    """The agent's end, owned by the agent. It connects the driver's streams to the fork server, ranks and inspector."""

    remote = True

    def __init__(self, link: AuthenticatedLink, clock: float) -> None:
        self.clock = clock
        self._mux = TcpMux(link.socket, key=link.key, first=1, open_stream=self._open)
        self.send = self._mux.send
        self.watch = self._mux.watch
        self._directory: str | None = None
        """The folder in which the ranks of the current fork server listen."""
        self._driver_end: socket.socket | None = None
        """The driver's end of the connection to the fork server, until the driver opens its stream."""

    def run(self, handle: Callable[[object], None]) -> str | None:
        why = self._mux.run(handle)
        return why if self._mux.broken else None  # The driver reports any other cause.

    def connect_server(self, directory: str) -> socket.socket:
        self._directory = directory
        self._driver_end, server_end = socket.socketpair()
        return server_end

    def expect_exit(self, driver: int, timeout: float) -> None:
        self._mux.end_after(timeout)  # The driver's exit ends the connection.

    def close(self) -> None:
        if self._driver_end is not None:
            self._driver_end.close()

    def _open(self, target: object) -> StreamSocket:
        """Return the socket for a stream that the driver opens; raise OSError if there is no such target."""
        if isinstance(target, ServerTarget) and self._driver_end is not None:
            end, self._driver_end = self._driver_end, None
            return StreamSocket(end)
        if isinstance(target, InspectorTarget) and self._directory is not None:
            ours, theirs = socket.socketpair()
            args = Connection(theirs.detach()), self._directory
            threading.Thread(target=answer, args=args, name="accel-inspector", daemon=True).start()
            return StreamSocket(ours)
        if isinstance(target, RankTarget) and self._directory is not None:
            path = socket_path(self._directory, target.world, target.rank)
            return StreamSocket(unix_sockets.connect(path), prctl.end_of(target.pid))
        raise FileNotFoundError(target)
