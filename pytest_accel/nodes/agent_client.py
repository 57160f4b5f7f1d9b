"""The driver's side of a launched process on another machine, and of the fork servers that it keeps there."""

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
from pytest_accel.core.messages import SessionSpec
from pytest_accel.core.paths import bridge_path, server_log_path
from pytest_accel.forkserver.server_client import ServerProcess
from pytest_accel.nodes.agent_messages import End, KillServer, ServerEnded, StartServer
from pytest_accel.nodes.local_agent_client import KeptServer
from pytest_accel.nodes.machines import Far
from pytest_accel.nodes.remote_leases import FarSupply
from pytest_accel.nodes.tcp_mux import Bridge, Opened

_LAST_WORD = 2.0
"""Seconds that the last word may take to be on its way."""


class FarKeeper:
    """Has the face of a `Keeper`."""

    def __init__(
        self, met: Far, node: str, on_lost: Callable[[], None], changes: Callable[[], dict[str, str | None]]
    ) -> None:
        """`node` is the machine's name. `changes`: as a `Keeper`'s."""
        self.hello = met.hello
        self.lost = False
        self.silent: str | None = None
        """Why its whole machine counts as lost; None: it does not."""
        self._on_lost = on_lost
        self._changes = changes
        self._servers: list[tuple[KeptServer, SessionSpec]] = []
        self._token: str | None = None
        self._bridge = Bridge(met.link.socket, key=met.link.key, first=0, open_stream=_nothing_here, take=self._take)
        self.supply = FarSupply(node, self._bridge.send)
        """The devices of its machine. One keeper of a machine is asked for them."""
        # Where a test forks this process, and the copy lives on, the other end would never see this one's end.
        os.register_at_fork(after_in_child=self._bridge.leave_to_parent)
        threading.Thread(target=self._run, name=f"accel-keeper-{met.hello.rank}", daemon=True).start()

    def spawn(self, spec: SessionSpec, end: socket.socket) -> ServerProcess:
        """Have it start a fork server."""
        number = len(self._servers)
        server = KeptServer(partial(self._bridge.send, KillServer(number)))
        self._servers.append((server, spec))
        self._bridge.listen(bridge_path(spec.directory, spec.server))
        self._bridge.send(StartServer(number, spec, self._changes(), self._leave_token(spec)))
        self._bridge.join(end.dup(), SERVER)
        if self.lost:
            self._end(server)
        return server

    def end(self, status: int) -> None:
        """Have it end with `status`."""
        self._bridge.send(End(status))
        self._bridge.settle(_LAST_WORD)
        if self._token is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._token)

    def _leave_token(self, spec: SessionSpec) -> str:
        if self._token is None:
            os.makedirs(spec.basetemp, mode=0o700, exist_ok=True)
            self._token = os.path.join(spec.basetemp, f"shared-{secrets.token_hex(8)}")
            with open(self._token, "w"):
                pass
        return self._token

    def _run(self) -> None:
        try:
            self.silent = self._bridge.run()
        finally:
            self.lost = True
            self.supply.lose()
            for server, _ in self._servers:
                self._end(server)
            self._on_lost()

    def _end(self, server: KeptServer) -> None:
        server.lost = self.silent is not None
        server.ended.set()

    def _take(self, message: Any) -> None:
        if self.supply.take(message):
            return
        if isinstance(message, ServerEnded):
            server, spec = self._servers[message.number]
            with contextlib.suppress(OSError), open(server_log_path(spec.directory, spec.server), "w") as log:
                log.write(message.log)
            server.ended.set()


def _nothing_here(name: str) -> Opened:
    raise FileNotFoundError(name)
