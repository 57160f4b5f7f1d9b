"""The driver's client of an agent: of the fork server that the agent runs, and of the devices of its machine."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from asyncio import Future, get_running_loop, sleep
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_accel.core import threads
from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.paths import agent_path, server_log_path
from pytest_accel.features.launchers.agent_messages import (
    AgentTarget,
    End,
    InventoryRequest,
    KillServer,
    LeaseRequest,
    LeaseWanted,
    Reply,
    ServerEnded,
    StartServer,
    WatchServer,
)
from pytest_accel.features.launchers.reserved_devices import UnfitDevicesError
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages import fd_passing, unix_sockets
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.pool.starter import LostPlaceError
from pytest_accel.settings.options import Settings

if TYPE_CHECKING:
    from pytest_accel.features.launchers.machine_link import DriverLink

_INVENTORY_TIMEOUT = 60
"""Seconds in which an agent must look up the devices of a kind: a driver may take some to initialise many of them. The
connection to an agent that is stopped (SIGSTOP) stays open, so its end is not enough."""
_END_TIMEOUT = 2
"""Seconds to wait until an agent on another machine has received the last message."""
_LOSS_TIMEOUT = 2.0
"""Seconds between the ends of two connections to a lost agent, at most."""


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
    """The driver's client of one agent."""

    def __init__(
        self,
        connection: Connection,
        machine: str,
        on_lost: Callable[[], None],
        changes: Callable[[], dict[str, str | None]],
        remote: tuple[DriverLink, str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        """The agent has opened `connection`; `machine` is the name of its machine.

        `on_lost` is called in a thread of this object when the connection has ended.

        `changes` returns the changes to the agent's environment for a fork server; None removes a variable.

        `remote` is the driver's end of the link to the agent's machine, and the agent's name in it. `settings` are
        given in a session on a cluster, in which the machine counts as lost when the agent ends.
        """
        self.machine = machine
        self.remote = remote is not None
        self.settings = settings
        """The settings by which the agent leases devices; None if they are not known yet."""
        self.lost = False
        """True if the connection to the agent has ended."""
        self.machine_loss: str | None = None
        """Why the whole machine counts as lost; None if it does not."""
        self._connection = connection
        self._on_lost = on_lost
        self._changes = changes
        self._link = remote
        self._stands_for_machine = settings is not None
        self._loss_handled = threading.Event()
        self._sending = threading.Lock()
        self._token: str | None = None
        self._inventories: dict[str, Inventory | str] = {}
        with fd_passing.socket_of(connection) as end:
            unix_sockets.limit_writes(end)  # The agent may be stopped (SIGSTOP).
        threads.start(self._watch, "accel-agent")

    def wait_lost(self) -> str | None:
        """Wait until the loss of the agent has been handled; another connection to it has ended.

        Return the name of the machine, and why it counts as lost; None if it does not.
        """
        self._loss_handled.wait(_LOSS_TIMEOUT)
        return None if self.machine_loss is None else f"{self.machine} ({self.machine_loss})"

    def _watch(self) -> None:
        """Wait until the agent's connection ends; the agent sends nothing more on it."""
        with suppress(EOFError, OSError):
            self._connection.recv_bytes()
        if self._link is not None:
            self.machine_loss = self._link[0].losses.get(self._link[1])
        if self._stands_for_machine:
            self.machine_loss = self.machine_loss or "its agent has ended"
        self.lost = True
        try:
            self._on_lost()
        finally:
            self._loss_handled.set()

    # Requests

    def _open(self, target: AgentTarget, end: socket.socket) -> None:
        """Connect `end` to the agent, for `target`. If the agent has ended, the connection ends, too."""
        if self._link is not None:
            link, name = self._link
            link.open(name, target, end.dup())
            return
        with self._sending, suppress(OSError):
            try:
                self._connection.send_bytes(encode(target))
                fd_passing.send(self._connection, [end.fileno()])
            except BlockingIOError:  # The agent may have received a part of the message.
                with fd_passing.socket_of(self._connection) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def _call(self, target: AgentTarget) -> Connection:
        """Return a new connection to the agent, for `target`."""
        ours, theirs = unix_sockets.pair()
        with theirs:
            self._open(target, theirs)
        return Connection(ours.detach())

    def end(self, status: int) -> None:
        """Have the agent's process exit with `status`."""
        with self._call(End(status, os.getpid())) as call:
            if self.remote:
                unix_sockets.is_readable(call.fileno(), _END_TIMEOUT)
        if self._token is not None:
            with suppress(OSError):
                os.unlink(self._token)

    def spawn(self, spec: SessionSpec, end: socket.socket) -> AgentServer:
        """Have the agent start a fork server, connected to `end`."""
        token = ""
        if self._link is not None:
            link, name = self._link
            path = agent_path(spec.directory, spec.server)
            with suppress(FileNotFoundError):
                os.unlink(path)
            link.listen(name, unix_sockets.listen(path, 64))
            token = self._leave_token(spec.basetemp)
        self._open(StartServer(spec, self._changes(), token), end)
        return AgentServer(self, spec, self._call(WatchServer()))

    def kill_server(self) -> None:
        self._call(KillServer()).close()

    def _leave_token(self, basetemp: str) -> str:
        """Return the path of a file in `basetemp` by which the agent finds out if the two share a file system."""
        if self._token is None:
            os.makedirs(basetemp, mode=0o700, exist_ok=True)
            self._token = os.path.join(basetemp, f"accel-shared-{secrets.token_hex(8)}")
            with open(self._token, "w", encoding="utf-8"):
                pass
        return self._token

    def inventory(self, kind: str) -> Inventory | str:
        """Return the machine's devices of `kind`, or why they cannot be looked up."""
        if kind not in self._inventories:
            self._inventories[kind] = self._look_up(kind)
        found = self._inventories[kind]
        if isinstance(found, str):
            return f"the {kind} devices of {self.machine} cannot be looked up: {found}"
        return found

    def _look_up(self, kind: str) -> Inventory | str:
        assert self.settings is not None
        with self._call(InventoryRequest(kind, self.settings)) as call:
            if not unix_sockets.is_readable(call.fileno(), _INVENTORY_TIMEOUT):
                return f"its agent did not answer within {_INVENTORY_TIMEOUT} s"
            try:
                reply: Reply = decode(call.recv_bytes(), Reply)
            except (EOFError, OSError):
                return f"the machine {self.machine} is lost"
            return reply.inventory or reply.error

    async def lease(
        self, demand: WorldDemand, need: DeviceNeed, mask: str | None, on_wanted: Callable[[], object]
    ) -> RemoteLease:
        """Wait for a lease, and return it. Raise :class:`PlaceError` or `UnfitDevicesError` if there will be none.

        `on_wanted` is called, here or later, when another session waits for the devices.
        """
        assert self.settings is not None
        lease = RemoteLease(self._call(LeaseRequest(self.settings, demand, need, mask)), on_wanted)
        try:
            reply = await lease.reply
            if reply is None:
                self.wait_lost()
                await sleep(0)  # The calls of `on_lost` come first: a repeated request must not get this machine.
                raise LostPlaceError(f"the machine {self.machine} is lost")
            if reply.error:
                raise (UnfitDevicesError if reply.unfit else PlaceError)(f"{reply.error} (on {self.machine})")
        except BaseException:
            lease.close()
            raise
        lease.devices = reply.devices
        return lease


class AgentServer:
    """A fork server that an agent has started (`ServerProcess`)."""

    def __init__(self, agent: AgentClient, spec: SessionSpec, watch: Connection) -> None:
        self.remote = agent.remote
        self._agent = agent
        self._spec = spec
        self._watch = watch
        self._is_lost = False
        """True if the agent has ended, and not the server alone."""

    @property
    def loss(self) -> str | None:
        return self._agent.wait_lost() if self._is_lost else None

    def kill(self) -> None:
        self._agent.kill_server()

    def wait(self, timeout: float) -> bool:
        if not self._watch.closed and unix_sockets.is_readable(self._watch.fileno(), timeout):
            with self._watch:
                try:
                    log = decode(self._watch.recv_bytes(), ServerEnded).log
                except (EOFError, OSError):
                    self._is_lost = True
                    log = ""
            if log:
                path = server_log_path(self._spec.directory, self._spec.server)
                with suppress(OSError), open(path, "w", encoding="utf-8") as file:
                    file.write(log)
        return self._watch.closed


class RemoteLease:
    """A lease on devices of another machine, or the request for one. Used in the thread of one event loop."""

    def __init__(self, call: Connection, on_wanted: Callable[[], object]) -> None:
        """`call` is the connection to the agent."""
        self.devices: tuple[Device, ...] = ()
        self.wanted = False
        """True once another session waits for the devices."""
        self._call = call
        self._on_wanted = on_wanted
        self._loop = get_running_loop()
        self.reply: Future[Reply | None] = self._loop.create_future()
        """The agent's answer; None if the agent has ended before."""
        self._loop.add_reader(call, self._read)

    def _read(self) -> None:
        try:
            message: Reply | LeaseWanted | None = decode(self._call.recv_bytes(), Reply | LeaseWanted)
        except (EOFError, OSError):
            self._loop.remove_reader(self._call)
            message = None
        if isinstance(message, LeaseWanted):
            self.wanted = True
            self._on_wanted()
        elif not self.reply.done():
            self.reply.set_result(message)

    def close(self) -> None:
        """Return the lease, or cancel the request."""
        if not self._call.closed:
            self._loop.remove_reader(self._call)
            # The connection may also be open in a process that a test has forked.
            with self._call, fd_passing.socket_of(self._call) as end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
