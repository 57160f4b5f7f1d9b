"""Both ends of the connection between the driver and an agent.

On the driver's machine it is a Unix socket that passes descriptors, and on another machine a :class:`TcpMux`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import wait

from msgspec import structs

from pytest_accel.core import prctl, threads
from pytest_accel.core.paths import agent_path, socket_path
from pytest_accel.diagnostics.inspector import answer
from pytest_accel.features.launchers.agent_messages import StartServer, ToAgent, ToDriver
from pytest_accel.features.launchers.greeting import AuthenticatedLink
from pytest_accel.features.launchers.tcp_mux import StreamSocket, TcpMux
from pytest_accel.messages import fd_passing, unix_sockets
from pytest_accel.messages.connect import InspectorTarget, RankTarget, ServerTarget, Target
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection


class _LocalTransport:
    """The base class of both ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        # An error means that the other process has exited, which `run` notices.
        with self._sending, contextlib.suppress(OSError):
            self._connection.send_bytes(encode(message))


class LocalClientTransport(_LocalTransport):
    """The driver's end of a connection; its `AgentClient` owns it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        with fd_passing.socket_of(connection) as end:
            unix_sockets.limit_writes(end)  # The agent may be stopped (SIGSTOP).

    def send(self, message: object) -> None:
        with self._sending:
            self._send(message)

    def start_server(self, message: StartServer, end: socket.socket) -> None:
        with self._sending:
            self._send(message, end.fileno())

    def _send(self, message: object, *descriptors: int) -> None:
        with contextlib.suppress(OSError):
            try:
                self._connection.send_bytes(encode(message))
                if descriptors:
                    fd_passing.send(self._connection, descriptors)
            except BlockingIOError:  # The agent may have received a part of the message.
                with fd_passing.socket_of(self._connection) as end:
                    end.shutdown(socket.SHUT_RDWR)

    def run(self, handle: Callable[[object], None]) -> None:
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                return
            handle(decode(data, ToDriver))

    def finish(self) -> None:
        pass


class LocalAgentTransport(_LocalTransport):
    """The agent's end of the connection; the agent owns it."""

    remote = False
    clock = 0.0

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._watched: dict[int, Callable[[], None]] = {}
        self._server_end: socket.socket | None = None
        """The descriptor that has followed the last `StartServer`."""
        self._over = False

    def run(self, handle: Callable[[object], None]) -> None:
        while not self._over:
            ready = wait([self._connection, *self._watched])
            for descriptor in [one for one in ready if isinstance(one, int)]:
                os.close(descriptor)
                self._watched.pop(descriptor)()
            if self._connection in ready:
                try:
                    message: ToAgent = decode(self._connection.recv_bytes(), ToAgent)
                    if isinstance(message, StartServer):
                        self._server_end = socket.socket(fileno=fd_passing.receive(self._connection, 1)[0])
                except (EOFError, OSError):
                    return
                handle(message)

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        self._watched[descriptor] = call

    def connect_server(self, directory: str) -> socket.socket:
        end, self._server_end = self._server_end, None
        assert end is not None
        return end

    def expect_exit(self, driver: int, timeout: float) -> None:
        # Wait for the process, not for the connection: that ends before the launcher can see the driver's exit status.
        end = prctl.end_of(driver)
        if end is not None:
            select.select([end], [], [], timeout)
            os.close(end)
        self._over = True

    def close(self) -> None:
        self._connection.close()
        if self._server_end is not None:
            self._server_end.close()


_FLUSH_TIMEOUT = 2.0
"""Seconds to wait until the last message has been sent."""


class TcpClientTransport:
    """The driver's end of a connection; its `AgentClient` owns it."""

    def __init__(self, link: AuthenticatedLink) -> None:
        self._mux = TcpMux(link, calls=False, open_stream=_nothing_here)
        self._token: str | None = None
        # If a test forks this process, the child must not keep the connection open after this process has ended.
        os.register_at_fork(after_in_child=self._mux.close_in_child)

    def send(self, message: object) -> None:
        self._mux.send(encode(message))

    def run(self, handle: Callable[[object], None]) -> str | None:
        return self._mux.run(lambda data: handle(decode(data, ToDriver)))

    def start_server(self, message: StartServer, end: socket.socket) -> None:
        self._mux.listen(agent_path(message.spec.directory, message.spec.server))
        self.send(structs.replace(message, token=self._leave_token(message.spec.basetemp)))
        self._mux.join(end.dup(), encode(ServerTarget()))

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


def _nothing_here(target: bytes) -> StreamSocket:
    """Raise FileNotFoundError: the driver has no targets for streams."""
    raise FileNotFoundError(target)


class TcpAgentTransport:
    """The agent's end, owned by the agent. It connects the driver's streams to the fork server, ranks and inspector."""

    remote = True

    def __init__(self, link: AuthenticatedLink, clock: float) -> None:
        self.clock = clock
        self._mux = TcpMux(link, calls=True, open_stream=self._open)
        self.watch = self._mux.watch
        self._directory: str | None = None
        """The folder in which the ranks of the current fork server listen."""
        self._driver_end: socket.socket | None = None
        """The driver's end of the connection to the fork server, until the driver opens its stream."""

    def send(self, message: object) -> None:
        self._mux.send(encode(message))

    def run(self, handle: Callable[[object], None]) -> str | None:
        why = self._mux.run(lambda data: handle(decode(data, ToAgent)))
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

    def _open(self, data: bytes) -> StreamSocket:
        """Return the socket for a stream that the driver opens; raise OSError if there is no such target."""
        target: Target = decode(data, Target)
        if isinstance(target, ServerTarget) and self._driver_end is not None:
            end, self._driver_end = self._driver_end, None
            return StreamSocket(end)
        if isinstance(target, InspectorTarget) and self._directory is not None:
            ours, theirs = socket.socketpair()
            threads.start(answer, "accel-inspector", Connection(theirs.detach()), self._directory)
            return StreamSocket(ours)
        if isinstance(target, RankTarget) and self._directory is not None:
            path = socket_path(self._directory, target.world, target.rank)
            return StreamSocket(unix_sockets.connect(path), prctl.end_of(target.pid))
        raise FileNotFoundError(target)
