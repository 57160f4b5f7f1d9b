"""The driver's client of an agent, and of the fork servers that the agent runs."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from pytest_accel.core.paths import server_log_path
from pytest_accel.features.launchers.agent_messages import End, Hello, KillServer, ServerEnded, StartServer
from pytest_accel.features.launchers.remote_leases import RemoteLeases
from pytest_accel.forkserver.server_process import ServerProcess
from pytest_accel.messages.session_spec import SessionSpec


class ClientTransport(Protocol):
    """The driver's end of its connection to an agent. All methods may be called in any thread."""

    remote: bool
    """True if the agent is on another machine."""

    def send(self, message: object) -> None:
        """Send `message` to the agent; no-op if the connection has ended."""

    def start_server(self, message: StartServer, end: socket.socket) -> None:
        """Send `message`, and connect the fork server to `end`, which the caller closes.

        No-op if the connection has ended.
        """

    def start(self, handle: Callable[[object], None], on_end: Callable[[str | None], None]) -> None:
        """Call `handle` with each message, and `on_end` once the connection has ended, in a thread of this object.

        `on_end` gets the reason if the whole machine counts as lost, and None if only the agent has ended.
        """

    def finish(self) -> None:
        """Wait until the last message has arrived, and remove what the connection needed."""


class EnvironmentChanges:
    """The changes to this process's environment since this object was created."""

    def __init__(self) -> None:
        self._before = dict(os.environ)

    def __call__(self) -> dict[str, str | None]:
        """Return the variables that have changed; None for a removed one."""
        names = self._before.keys() | os.environ
        changed = {name for name in names if self._before.get(name) != os.environ.get(name)}
        return {name: os.environ.get(name) for name in changed if not name.startswith("PYTEST_CURRENT_TEST")}


class AgentClient:
    """The driver's client of one agent; owned by the `LaunchedSession` or the `ClusterMachines`."""

    def __init__(
        self,
        hello: Hello,
        transport: ClientTransport,
        machine: str,
        on_lost: Callable[[], None],
        changes: Callable[[], dict[str, str | None]],
        *,
        stands_for_machine: bool = False,
    ) -> None:
        """`machine` is the name of the agent's machine.

        With `stands_for_machine`, the machine counts as lost when the agent ends.

        `changes` returns the changes to the agent's environment for a fork server; None removes a variable.

        `on_lost` is called in the transport's thread when the connection to the agent has ended.
        """
        self.hello = hello
        self.lost = False
        """True if the connection to the agent has ended."""
        self.machine_loss: str | None = None
        """Why the whole machine counts as lost; None if it does not."""
        self.leases = RemoteLeases(machine, transport.send)
        """The leases on devices of the agent's machine. Only one agent of each machine is used for leases."""
        self._machine = machine
        self._transport = transport
        self._on_lost = on_lost
        self._changes = changes
        self._stands_for_machine = stands_for_machine
        self._servers: list[_AgentServer] = []
        transport.start(self._handle, self._connection_ended)

    def spawn(self, spec: SessionSpec, end: socket.socket) -> ServerProcess:
        """Have the agent start a fork server, connected to `end`."""
        number = len(self._servers)
        server = _AgentServer(number, spec, self._transport)
        self._servers.append(server)
        self._transport.start_server(StartServer(number, spec, self._changes()), end)
        if self.lost:
            self._end(server)
        return server

    def end(self, status: int) -> None:
        """Have the agent's process exit with `status`."""
        self._transport.send(End(status, os.getpid()))
        self._transport.finish()

    def _connection_ended(self, why: str | None) -> None:
        self.machine_loss = "its agent has ended" if why is None and self._stands_for_machine else why
        self.lost = True
        try:
            self._on_lost()  # First: a request that is repeated because of the loss must not get this machine.
        finally:
            self.leases.lose()
            for server in self._servers:
                self._end(server)

    def _end(self, server: _AgentServer) -> None:
        server.loss = None if self.machine_loss is None else f"{self._machine} ({self.machine_loss})"
        server.ended.set()

    def _handle(self, message: object) -> None:
        if isinstance(message, ServerEnded):
            server = self._servers[message.number]
            if message.log:
                path = server_log_path(server.spec.directory, server.spec.server)
                with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as log:
                    log.write(message.log)
            server.ended.set()
        else:
            self.leases.handle(message)


class _AgentServer:
    """A fork server that is an agent's child process."""

    def __init__(self, number: int, spec: SessionSpec, transport: ClientTransport) -> None:
        self.spec = spec
        self.ended = threading.Event()
        self.loss: str | None = None
        self.remote = transport.remote
        self._number = number
        self._transport = transport

    def kill(self) -> None:
        self._transport.send(KillServer(self._number))

    def wait(self, timeout: float) -> bool:
        return self.ended.wait(timeout)
