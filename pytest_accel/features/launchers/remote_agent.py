"""An agent on another machine, as the driver sees it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from pytest_accel.core.clock import monotonic
from pytest_accel.core.paths import agent_path
from pytest_accel.features.launchers.agent_messages import Ending, Hello, Meeting, StartServer
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import ServerTarget
from pytest_accel.messages.struct_messages import encode, frame

if TYPE_CHECKING:
    from pytest_accel.features.launchers.machine_link import DriverLink

_FLUSH_TIMEOUT = 2.0
"""Seconds to wait until the agent has received the last message."""


class RemoteAgent:
    """An agent that has connected to the driver from another machine; the `ClientTransport` of its client."""

    def __init__(self, link: DriverLink, peer: bytes, hello: Hello, address: str) -> None:
        """`address` is that of the agent's machine; `link` names the connection `peer`."""
        self.peer = peer
        self.hello = hello
        self.address = address
        self.heard = monotonic()
        """The time of the last message."""
        self._link = link
        self._listener: socket.socket | None = None
        """The socket at which drivers call targets on the agent's machine."""
        self._token: str | None = None
        self._handle: Callable[[object], None] | None = None
        self._on_end: Callable[[str | None], None] | None = None
        self._lost: tuple[str | None] | None = None
        """Why the connection has ended; None if it has not."""
        self._ending = threading.Event()
        """Set once the agent has received `End`, or is lost."""

    @property
    def own_address(self) -> str:
        """The address of this machine at which the agent's machine reaches it."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((self.address, 9))  # This sends nothing.
            return str(probe.getsockname()[0])

    def meet(self, *, remote: bool) -> None:
        """Answer the greeting; unless `remote`, the agent disconnects."""
        self.send(Meeting(remote))

    def start(self, handle: Callable[[object], None], on_end: Callable[[str | None], None]) -> None:
        self._link.post(partial(self._start, handle, on_end))

    def send(self, message: object) -> None:
        self._link.post(partial(self._link.send, self, message))

    def start_server(self, message: StartServer, end: socket.socket) -> None:
        message = structs.replace(message, token=self._leave_token(message.spec.basetemp))
        path = agent_path(message.spec.directory, message.spec.server)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        ends = unix_sockets.listen(path, 64), end.dup()
        if not self._link.post(partial(self._connect_server, message, *ends)):
            for one in ends:
                one.close()

    def finish(self) -> None:
        self._ending.wait(_FLUSH_TIMEOUT)
        if self._token is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._token)

    def _leave_token(self, basetemp: str) -> str:
        """Return the path of a file in `basetemp` by which the agent finds out if the two share a file system."""
        if self._token is None:
            os.makedirs(basetemp, mode=0o700, exist_ok=True)
            self._token = os.path.join(basetemp, f"accel-shared-{secrets.token_hex(8)}")
            with open(self._token, "w", encoding="utf-8"):
                pass
        return self._token

    # In the loop of the link

    def handle(self, message: object) -> None:
        """Pass on a message of the agent."""
        if isinstance(message, Ending):
            self._ending.set()
        elif self._handle is not None:
            self._handle(message)

    def lose(self, why: str | None) -> None:
        """Report that the connection has ended, with the reason if the whole machine counts as lost."""
        self._lost = (why,)
        self._ending.set()
        if self._listener is not None:
            self._link.end_accept(self._listener)
        if self._on_end is not None:
            self._on_end(why)

    def _start(self, handle: Callable[[object], None], on_end: Callable[[str | None], None]) -> None:
        self._handle, self._on_end = handle, on_end
        if self._lost is not None:
            on_end(*self._lost)

    def _connect_server(self, message: StartServer, listener: socket.socket, end: socket.socket) -> None:
        """Have the agent start a fork server that is connected to `end`.

        Each connection to `listener`, which replaces the earlier one, becomes a stream to the agent.
        """
        if self._lost is not None:
            listener.close()
            end.close()
            return
        if self._listener is not None:
            self._link.end_accept(self._listener)
        self._listener = listener
        self._link.accept(self, listener)
        self._link.send(self, message)
        self._link.carry(self, end, frame(encode(ServerTarget())))
