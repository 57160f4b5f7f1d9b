"""The driver's client of an agent: of the fork server that the agent runs, and of the devices of its machine."""

from __future__ import annotations

import os
import socket
from asyncio import Future, get_running_loop
from collections.abc import Callable
from contextlib import suppress
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
from pytest_accel.messages.struct_messages import decode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.pool.starter import LostPlaceError
from pytest_accel.settings.options import Settings

if TYPE_CHECKING:
    from pytest_accel.features.launchers.machine_link import DriverLink

_END_TIMEOUT = 2
"""Seconds to wait until an agent has received the last message."""


class EnvironmentChanges:
    """The changes to this process's environment since this object was created."""

    def __init__(self) -> None:
        self._before = dict(os.environ)

    def __call__(self) -> dict[str, str | None]:
        """Return the variables that have changed; None for a removed variable."""
        names = self._before.keys() | os.environ
        changed = {name for name in names if self._before.get(name) != os.environ.get(name)}
        return {name: os.environ.get(name) for name in changed if not name.startswith("PYTEST_CURRENT_TEST")}


class AgentClient:
    """The driver's client of one agent, and the process of its fork server (`ServerProcess`)."""

    remote = True

    def __init__(
        self,
        link: DriverLink,
        agent: str,
        machine: str,
        on_lost: Callable[[], None],
        changes: Callable[[], dict[str, str | None]],
        settings: Settings | None = None,
        cores: tuple[int, ...] = (),
    ) -> None:
        """`agent` is the name of the agent in the driver's `link`, and `machine` the name of its machine.

        `on_lost` is called in the link's thread when the connection has ended.

        `changes` returns the changes to the agent's environment for a fork server; None removes a variable.

        `settings` are given in a session on a cluster, in which the machine counts as lost when the agent ends. `cores`
        are the CPU cores that ranks may use; empty for those of the agent.
        """
        self.machine = machine
        self.settings = settings
        """The settings by which the agent leases devices; None if they are not known yet."""
        self.lost = False
        """True if the connection to the agent has ended."""
        self.machine_loss: str | None = None
        """Why the whole machine counts as lost; None if it does not."""
        self._link = link
        self._agent = agent
        self._on_lost = on_lost
        self._changes = changes
        self._cores = cores
        self._stands_for_machine = settings is not None
        self._token: Path | None = None
        self._log: str
        """The path of the log of the last fork server."""
        self._watch: Connection
        """A connection that ends with the last fork server."""
        link.watch(agent, self._lost)

    def _lost(self, machine_loss: str | None) -> None:
        self.machine_loss = machine_loss or ("its agent has ended" if self._stands_for_machine else None)
        self.lost = True
        self._on_lost()

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

    def _call(self, target: AgentTarget) -> Connection:
        """Return a new connection to the agent, for `target`. If the agent has ended, the connection ends, too."""
        ours, theirs = unix_sockets.pair()
        self._link.open(self._agent, target, theirs)
        return Connection(ours.detach())

    def end(self, status: int) -> None:
        """Have the agent's process exit with `status`."""
        with self._call(End(status, os.getpid())) as call:
            unix_sockets.is_readable(call.fileno(), _END_TIMEOUT)
        if self._token is not None:
            self._token.unlink(missing_ok=True)

    def spawn(self, spec: SessionSpec, end: socket.socket) -> AgentClient:
        """Have the agent start a fork server, connected to `end`; return this object as the server's process."""
        path = agent_path(spec.directory, spec.server)
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._link.listen(self._agent, unix_sockets.listen(path, 64))
        start = StartServer(spec, self._changes(), self._cores)
        os.makedirs(spec.basetemp, mode=0o700, exist_ok=True)
        self._token = Path(start.token)
        self._token.touch()
        self._link.open(self._agent, start, end.dup())
        self._log = server_log_path(spec.directory, spec.server)
        self._watch = self._call(WatchServer())
        return self

    async def lease(
        self, demand: WorldDemand, need: DeviceNeed, mask: str | None, on_wanted: Callable[[], object]
    ) -> RemoteLease:
        """Wait for a lease, and return it. Raise :class:`PlaceError` if there will be none.

        `on_wanted` is called, here or later, when another request waits for the devices.
        """
        assert self.settings is not None
        lease = RemoteLease(self._call(LeaseRequest(self.settings, demand, need, mask)), on_wanted)
        try:
            reply = await lease.reply
            if reply is None:
                raise LostPlaceError(f"the machine {self.machine} is lost")
            if reply.error:
                raise PlaceError(f"{reply.error} (on {self.machine})")
        except BaseException:
            lease.close()
            raise
        return lease


class RemoteLease:
    """A lease on devices of another machine, or the request for one. Used in the thread of one event loop."""

    def __init__(self, call: Connection, on_wanted: Callable[[], object]) -> None:
        """`call` is the connection to the agent."""
        self.wanted = False
        """True once another request waits for the devices."""
        self._call = call
        self._on_wanted = on_wanted
        self._loop = get_running_loop()
        self.reply: Future[LeaseReply | None] = self._loop.create_future()
        """The agent's answer; None if the agent has ended before."""
        self._loop.add_reader(call, self._read)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, once the lease is granted."""
        reply = self.reply.result()
        return () if reply is None else reply.devices

    def _read(self) -> None:
        try:
            reply: LeaseReply | None = decode(self._call.recv_bytes(), LeaseReply)
        except (EOFError, OSError):
            self._loop.remove_reader(self._call)
            reply = None
        if not self.reply.done():
            self.reply.set_result(reply)
        if reply is not None and reply.wanted:
            self.wanted = True
            self._on_wanted()

    def close(self) -> None:
        """Return the lease, or cancel the request."""
        if not self._call.closed:
            self._loop.remove_reader(self._call)
            # The connection may also be open in a process that a test has forked.
            with self._call, unix_sockets.socket_of(self._call) as end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
