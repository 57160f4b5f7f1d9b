"""The driver's client of an agent: of the fork server that the agent runs, and of the devices of its machine."""

from __future__ import annotations

import os
import socket
from asyncio import StreamWriter, open_connection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.session_folder import agent_path, server_log_path
from pytest_accel.features.launchers.agent_messages import (
    AgentTarget,
    End,
    KillServer,
    LeaseReply,
    LeaseRequest,
    StartServer,
    WatchServer,
)
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import read_message
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.pool.starter import LostPlaceError
from pytest_accel.settings.options import Settings

if TYPE_CHECKING:
    from pytest_accel.features.launchers.machine_link import DriverLink

_END_TIMEOUT = 2
"""Seconds to wait until an agent has received the last message."""


class AgentClient:
    """The driver's client of one agent, and the process of its fork server (`ServerProcess`)."""

    def __init__(
        self,
        link: DriverLink,
        agent: str,
        machine: str,
        settings: Settings | None = None,
        cores: tuple[int, ...] = (),
        *,
        stands_for_machine: bool = False,
    ) -> None:
        """`agent` is the name of the agent in the driver's `link`, and `machine` the name of its machine.

        `cores` are the CPU cores that ranks may use; empty for those of the agent. With `stands_for_machine`, as on a
        cluster, the machine counts as lost when the agent ends.
        """
        self.machine = machine
        self.settings = settings
        """The settings by which the agent leases devices; None if they are not known yet."""
        self._link = link
        self._agent = agent
        self._cores = cores
        self._stands_for_machine = stands_for_machine
        self._token: Path | None = None
        self._log: str
        """The path of the log of the last fork server."""
        self._watch: Connection
        """A connection that ends with the last fork server."""

    @property
    def lost(self) -> bool:
        """True if the connection to the agent has ended."""
        return self._agent in self._link.lost

    @property
    def machine_loss(self) -> str | None:
        """Why the whole machine counts as lost; None if it does not."""
        ended = "its agent has ended" if self.lost and self._stands_for_machine else None
        return self._link.lost.get(self._agent) or ended

    @property
    def loss(self) -> str | None:
        return f"{self.machine} ({self.machine_loss})" if self.machine_loss is not None else None

    def kill(self) -> None:
        self._call(KillServer()).close()

    def wait(self, timeout: float) -> bool:
        if not self._watch.closed and unix_sockets.is_readable(self._watch.fileno(), timeout):
            with self._watch, suppress(EOFError, OSError):  # The agent may have ended.
                Path(self._log).write_bytes(self._watch.recv_bytes())
        return self._watch.closed

    # Requests

    def _call(self, target: AgentTarget) -> socket.socket:
        """Return a new connection to the agent, for `target`. If the agent has ended, the connection ends, too."""
        ours, theirs = unix_sockets.pair()
        self._link.open(self._agent, target, theirs)
        return ours

    def end(self, status: int) -> None:
        """Have the agent's process exit with `status`."""
        with self._call(End(status, os.getpid())) as call:
            unix_sockets.is_readable(call.fileno(), _END_TIMEOUT)
        if self._token is not None:
            self._token.unlink(missing_ok=True)

    def spawn(self, spec: SessionSpec) -> tuple[AgentClient, socket.socket]:
        """Have the agent start a fork server (`Spawn`); this object is the server's process."""
        path = agent_path(spec.directory, spec.server)
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._link.listen(self._agent, unix_sockets.listen(path, 64))
        start = StartServer(spec, self._cores)
        os.makedirs(spec.basetemp, mode=0o700, exist_ok=True)
        self._token = Path(start.token)
        self._token.touch()
        connection = self._call(start)
        self._log = server_log_path(spec.directory, spec.server)
        self._watch = Connection(self._call(WatchServer()).detach())
        return self, connection

    async def lease(self, demand: WorldDemand, need: DeviceNeed, mask: str | None) -> RemoteLease:
        """Wait for a lease, and return it. Raise :class:`PlaceError` if there will be none."""
        assert self.settings is not None
        reader, connection = await open_connection(sock=self._call(LeaseRequest(self.settings, demand, need, mask)))
        with ExitStack() as undo:
            undo.callback(_end, connection)
            reply: LeaseReply | None = await read_message(reader, LeaseReply)
            if reply is None:
                raise LostPlaceError(f"the machine {self.machine} is lost")
            if reply.error:
                raise PlaceError(f"{reply.error} (on {self.machine})")
            undo.pop_all()
        return RemoteLease(reply.devices, connection)


@dataclass(frozen=True, slots=True)
class RemoteLease:
    """A lease on devices of another machine."""

    devices: tuple[Device, ...]
    connection: StreamWriter
    """The connection to the agent, which takes the devices back when it ends."""

    def close(self) -> None:
        """Return the lease."""
        _end(self.connection)


def _end(connection: StreamWriter) -> None:
    with suppress(OSError):  # The other end may be closed.
        connection.write_eof()  # The connection may also be open in a process that a test has forked.
    connection.close()
