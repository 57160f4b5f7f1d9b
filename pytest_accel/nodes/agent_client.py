"""The driver's client of an agent on another node, and of the fork servers that the agent runs."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from pytest_accel.core.connect import SERVER
from pytest_accel.core.paths import bridge_path, server_log_path
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.forkserver.server_client import ServerProcess
from pytest_accel.nodes.agent_messages import End, KillServer, ServerEnded, StartServer
from pytest_accel.nodes.local_agent_client import AgentServer
from pytest_accel.nodes.machines import RemotePeer
from pytest_accel.nodes.remote_leases import RemoteLeases
from pytest_accel.nodes.tcp_mux import StreamTarget, TcpMux

_FLUSH_TIMEOUT = 2.0
"""Seconds to wait until the last message has been sent."""


class TcpAgentClient:
    """The client of an agent on another node; same interface as `LocalAgentClient`."""

    def __init__(
        self, met: RemotePeer, node: str, on_lost: Callable[[], None], changes: Callable[[], dict[str, str | None]]
    ) -> None:
        """`node` is the node's name. For `changes` see `LocalAgentClient`."""
        self.hello = met.hello
        self.lost = False
        self.silent: str | None = None
        """Why the whole node counts as lost; None if it does not."""
        self._on_lost = on_lost
        self._changes = changes
        self._servers: list[tuple[AgentServer, SessionSpec]] = []
        self._token: str | None = None
        self._mux = TcpMux(met.link.socket, key=met.link.key, first=0, open_stream=_nothing_here, take=self._handle)
        self.supply = RemoteLeases(node, self._mux.send)
        """The devices of the agent's node. Only one agent of a node leases them."""
        # If a test forks this process, the child must not keep the connection open after this process has ended.
        os.register_at_fork(after_in_child=self._mux.leave_to_parent)
        threading.Thread(target=self._run, name=f"accel-agent-{met.hello.rank}", daemon=True).start()

    def spawn(self, spec: SessionSpec, end: socket.socket) -> ServerProcess:
        """Have the agent start a fork server, connected to `end`."""
        number = len(self._servers)
        server = AgentServer(partial(self._mux.send, KillServer(number)))
        self._servers.append((server, spec))
        self._mux.listen(bridge_path(spec.directory, spec.server))
        self._mux.send(StartServer(number, spec, self._changes(), self._leave_token(spec)))
        self._mux.join(end.dup(), SERVER)
        if self.lost:
            self._end(server)
        return server

    def end(self, status: int) -> None:
        """Have the agent's process exit with `status`."""
        self._mux.send(End(status))
        self._mux.settle(_FLUSH_TIMEOUT)
        if self._token is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._token)

    def _leave_token(self, spec: SessionSpec) -> str:
        """Return the path of a file in `basetemp` by which the agent finds out if the two share a file system."""
        if self._token is None:
            os.makedirs(spec.basetemp, mode=0o700, exist_ok=True)
            self._token = os.path.join(spec.basetemp, f"shared-{secrets.token_hex(8)}")
            with open(self._token, "w"):
                pass
        return self._token

    def _run(self) -> None:
        try:
            self.silent = self._mux.run()
        finally:
            self.lost = True
            self.supply.lose()
            for server, _ in self._servers:
                self._end(server)
            self._on_lost()

    def _end(self, server: AgentServer) -> None:
        server.lost = self.silent is not None
        server.ended.set()

    def _handle(self, message: Any) -> None:
        if self.supply.handle(message):
            return
        if isinstance(message, ServerEnded):
            server, spec = self._servers[message.number]
            with contextlib.suppress(OSError), open(server_log_path(spec.directory, spec.server), "w") as log:
                log.write(message.log)
            server.ended.set()


def _nothing_here(name: str) -> StreamTarget:
    raise FileNotFoundError(name)
