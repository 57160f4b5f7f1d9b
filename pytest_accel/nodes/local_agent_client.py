"""The driver's client of an agent on its own node, and of the fork servers that the agent runs."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from pytest_accel.core import fd_passing
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.forkserver.server_client import ServerProcess
from pytest_accel.nodes.agent_messages import End, Hello, KillServer, ServerEnded, StartServer, Welcome

_END_TIMEOUT = 10.0
"""Seconds to wait for the end of a fork server where the caller sets no timeout."""


class LocalAgentClient:
    """The client of an agent on the driver's node, over a socket."""

    def __init__(
        self,
        hello: Hello,
        connection: Connection,
        on_lost: Callable[[], None],
        changes: Callable[[], dict[str, str | None]],
    ) -> None:
        """`changes` returns the changes to the agent's environment for a fork server; None removes a variable.

        `on_lost` is called in this object's thread when the connection to the agent has ended.
        """
        self.hello = hello
        self.lost = False
        self._connection = connection
        self._on_lost = on_lost
        self._changes = changes
        self._sending = threading.Lock()
        self._servers: list[AgentServer] = []
        self._send(Welcome(os.getpid()))
        threading.Thread(target=self._listen, name=f"accel-agent-{hello.rank}", daemon=True).start()

    def spawn(self, spec: SessionSpec, end: socket.socket) -> ServerProcess:
        """Have the agent start a fork server, connected to `end`."""
        server = AgentServer(partial(self._send, KillServer(len(self._servers))))
        message = StartServer(len(self._servers), spec, self._changes())
        self._servers.append(server)
        with self._sending:
            try:
                self._connection.send(message)
                fd_passing.send(self._connection, [end.fileno()])
            except OSError:
                server.ended.set()
        if self.lost:
            server.ended.set()
        return server

    def end(self, status: int) -> None:
        """Have the agent's process exit with `status`."""
        self._send(End(status))

    def _send(self, message: object) -> None:
        with self._sending, contextlib.suppress(OSError):  # The agent has ended; the thread notices that.
            self._connection.send(message)

    def _listen(self) -> None:
        try:
            while True:
                message: Any = self._connection.recv()
                if isinstance(message, ServerEnded):
                    self._servers[message.number].ended.set()
        except (EOFError, OSError):
            pass
        finally:  # After any error: otherwise a caller that waits for a server of this agent would wait forever.
            self.lost = True
            for server in self._servers:
                server.ended.set()
            self._on_lost()


class AgentServer:
    """A fork server that is an agent's child process."""

    def __init__(self, request_kill: Callable[[], None]) -> None:
        self.ended = threading.Event()
        self.lost = False
        self._request_kill = request_kill

    def kill(self) -> None:
        self._request_kill()

    def kill_tree(self) -> None:
        self._request_kill()

    def wait(self, timeout: float | None) -> bool:
        # Never without a timeout: a stopped agent (SIGSTOP) sends nothing.
        return self.ended.wait(_END_TIMEOUT if timeout is None else timeout)
