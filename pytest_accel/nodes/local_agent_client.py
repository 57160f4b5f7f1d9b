"""The driver's side of the other launched processes of its machine, and of the fork servers that they keep."""

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
from pytest_accel.core.messages import SessionSpec
from pytest_accel.forkserver.server_client import ServerProcess
from pytest_accel.nodes.agent_messages import End, Hello, KillServer, ServerEnded, StartServer, Welcome

_END_PATIENCE = 10.0


class Keeper:
    """Another launched process, as the driver reaches it."""

    def __init__(
        self,
        hello: Hello,
        connection: Connection,
        on_lost: Callable[[], None],
        changes: Callable[[], dict[str, str | None]],
    ) -> None:
        """`changes` gives what the environment of its fork servers is to differ in from its own."""
        self.hello = hello
        self.lost = False
        self._connection = connection
        self._on_lost = on_lost
        self._changes = changes
        self._sending = threading.Lock()
        self._servers: list[KeptServer] = []
        self._send(Welcome(os.getpid()))
        threading.Thread(target=self._listen, name=f"accel-keeper-{hello.rank}", daemon=True).start()

    def spawn(self, spec: SessionSpec, end: socket.socket) -> ServerProcess:
        """Have it start a fork server."""
        server = KeptServer(partial(self._send, KillServer(len(self._servers))))
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
        """Have it end with `status`."""
        self._send(End(status))

    def _send(self, message: object) -> None:
        with self._sending, contextlib.suppress(OSError):  # It is gone, which the thread finds.
            self._connection.send(message)

    def _listen(self) -> None:
        try:
            while True:
                message: Any = self._connection.recv()
                if isinstance(message, ServerEnded):
                    self._servers[message.number].ended.set()
        except (EOFError, OSError):
            pass
        finally:  # After any error, or whoever waits for a server of this keeper would wait for ever.
            self.lost = True
            for server in self._servers:
                server.ended.set()
            self._on_lost()


class KeptServer:
    """A fork server that is a keeper's child."""

    def __init__(self, have_killed: Callable[[], None]) -> None:
        self.ended = threading.Event()
        self.lost = False
        self._have_killed = have_killed

    def kill(self) -> None:
        self._have_killed()

    def kill_tree(self) -> None:
        self._have_killed()

    def wait(self, patience: float | None) -> bool:
        # A keeper that somebody has stopped says nothing.
        return self.ended.wait(_END_PATIENCE if patience is None else patience)
