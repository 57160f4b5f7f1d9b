"""Both ends of the connection between the driver and an agent on its machine: a Unix socket that passes descriptors."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import wait

from pytest_accel.core import prctl, threads
from pytest_accel.features.launchers.agent_messages import StartServer, ToAgent, ToDriver
from pytest_accel.messages import fd_passing, unix_sockets
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

    remote = False

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

    def start(self, handle: Callable[[object], None], on_end: Callable[[str | None], None]) -> None:
        threads.start(self._run, "accel-agent", handle, on_end)

    def _run(self, handle: Callable[[object], None], on_end: Callable[[str | None], None]) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    handle(decode(self._connection.recv_bytes(), ToDriver))
        finally:  # After any error, too: otherwise a caller that waits for a server of this agent would wait forever.
            on_end(None)

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
