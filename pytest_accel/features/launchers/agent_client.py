"""The driver's client of an agent: of the fork server that the agent runs, and of the devices of its machine."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from asyncio import AbstractEventLoop, get_running_loop, wrap_future
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from pytest_accel.core import threads
from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.paths import agent_path, server_log_path
from pytest_accel.features.launchers.agent_messages import (
    End,
    Ending,
    InventoryRequest,
    KillServer,
    LeaseRequest,
    LeaseWanted,
    Reply,
    ReturnLease,
    ServerEnded,
    StartServer,
    ToAgent,
    ToDriver,
)
from pytest_accel.forkserver.server_process import ServerProcess
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.leases import UnfitDevicesError
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages import fd_passing, unix_sockets
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.pool.starter import LostPlaceError
from pytest_accel.settings.options import Settings

if TYPE_CHECKING:
    from pytest_accel.features.launchers.machine_link import DriverLink

_INVENTORY_TIMEOUT = 60.0
"""Seconds in which an agent must look up the devices of a kind: a driver may take some to initialise many of them. The
connection to an agent that is stopped (SIGSTOP) stays open, so its end is not enough."""
_FLUSH_TIMEOUT = 2.0
"""Seconds to wait until an agent has received the last message."""


class EnvironmentChanges:
    """The changes to this process's environment since this object was created."""

    def __init__(self) -> None:
        self._before = dict(os.environ)

    def __call__(self) -> dict[str, str | None]:
        """Return the variables that have changed; None for a removed one."""
        names = self._before.keys() | os.environ
        changed = {name for name in names if self._before.get(name) != os.environ.get(name)}
        return {name: os.environ.get(name) for name in changed if not name.startswith("PYTEST_CURRENT_TEST")}


@dataclass(eq=False, slots=True)
class RemoteLease:
    """A lease on devices of another machine, or the request for one."""

    number: int
    on_wanted: Callable[[], object]
    loop: AbstractEventLoop = field(default_factory=get_running_loop)
    """The loop in which :meth:`notify` is called."""
    devices: tuple[Device, ...] = ()
    wanted: bool = False
    """True once another session waits for the devices."""

    def notify(self) -> None:
        """Note that another session waits for the devices."""
        self.wanted = True
        self.on_wanted()


class AgentClient:
    """The driver's client of one agent, and its handle of the agent's fork server (`ServerProcess`)."""

    def __init__(
        self,
        connection: Connection,
        machine: str,
        on_lost: Callable[[], None],
        changes: Callable[[], dict[str, str | None]],
        remote: tuple[DriverLink, str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        """`machine` is the name of the agent's machine.

        `on_lost` is called in a thread of this object when the connection has ended.

        `changes` returns the changes to the agent's environment for a fork server; None removes a variable.

        `remote` is the driver's end of the link to the agent's machine, and the agent's name in it. `settings` are
        those of a session on a cluster, in which the machine counts as lost when the agent ends.
        """
        self.lost = False
        """True if the connection to the agent has ended."""
        self.machine_loss: str | None = None
        """Why the whole machine counts as lost; None if it does not."""
        self._connection = connection
        self._machine = machine
        self._on_lost = on_lost
        self._changes = changes
        self._remote = remote
        self._settings = settings
        self._stands_for_machine = settings is not None
        self._sending = threading.Lock()
        self._spec: SessionSpec | None = None
        """The session's data for the last fork server."""
        self._token: str | None = None
        self._server_ended, self._ending = threading.Event(), threading.Event()
        self._inventories: dict[str, Inventory | str] = {}
        self._numbers = count()
        self._asked: dict[int, Future[Reply]] = {}
        """The requests that have no answer yet, by number."""
        self._leases: dict[int, RemoteLease] = {}
        """The leases that were requested and have not been returned, by the number of the request."""
        with fd_passing.socket_of(connection) as end:
            unix_sockets.limit_writes(end)  # The agent may be stopped (SIGSTOP).
        threads.start(self._run, "accel-agent")

    def _send(self, message: ToAgent, *descriptors: int) -> None:
        """Send `message`; no-op if the agent has ended, which :meth:`_run` notices."""
        with self._sending, suppress(OSError):
            try:
                self._connection.send_bytes(encode(message))
                if descriptors:
                    fd_passing.send(self._connection, descriptors)
            except BlockingIOError:  # The agent may have received a part of the message.
                with fd_passing.socket_of(self._connection) as end:
                    end.shutdown(socket.SHUT_RDWR)

    def end(self, status: int) -> None:
        """Have the agent's process exit with `status`."""
        self._send(End(status, os.getpid()))
        if self._remote is not None:
            self._ending.wait(_FLUSH_TIMEOUT)
        if self._token is not None:
            with suppress(OSError):
                os.unlink(self._token)

    # The fork server

    def spawn(self, spec: SessionSpec, end: socket.socket) -> ServerProcess:
        """Have the agent start a fork server, connected to `end`."""
        self._server_ended.clear()
        self._spec = spec
        if self._remote is None:
            self._send(StartServer(spec, self._changes()), end.fileno())
        else:
            link, name = self._remote
            path = agent_path(spec.directory, spec.server)
            with suppress(FileNotFoundError):
                os.unlink(path)
            message = StartServer(spec, self._changes(), self._leave_token(spec.basetemp))
            link.start_server(name, message, end.dup(), unix_sockets.listen(path, 64))
        if self.lost:
            self._server_ended.set()
        return self

    def _leave_token(self, basetemp: str) -> str:
        """Return the path of a file in `basetemp` by which the agent finds out if the two share a file system."""
        if self._token is None:
            os.makedirs(basetemp, mode=0o700, exist_ok=True)
            self._token = os.path.join(basetemp, f"accel-shared-{secrets.token_hex(8)}")
            with open(self._token, "w", encoding="utf-8"):
                pass
        return self._token

    @property
    def remote(self) -> bool:
        return self._remote is not None

    @property
    def loss(self) -> str | None:
        return None if self.machine_loss is None else f"{self._machine} ({self.machine_loss})"

    def kill(self) -> None:
        self._send(KillServer())

    def wait(self, timeout: float) -> bool:
        return self._server_ended.wait(timeout)

    # The devices of the machine

    def _ask(self, request: InventoryRequest | LeaseRequest) -> Future[Reply]:
        """Send a request, and return its answer, which is :class:`PlaceError` once the agent is lost."""
        answer = self._asked[request.number] = Future()
        self._send(request)
        if self.lost:
            self._fail_requests()
        return answer

    def _fail_requests(self) -> None:
        error = LostPlaceError if self._stands_for_machine else PlaceError
        with suppress(KeyError):  # There are none left.
            while True:
                _, answer = self._asked.popitem()
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(error(f"the machine {self._machine} is lost"))

    def inventory(self, kind: str, settings: Settings) -> Inventory | str:
        """Return the machine's devices of `kind`, or why they cannot be looked up."""
        self._settings = settings
        if kind not in self._inventories:
            try:
                reply = self._ask(InventoryRequest(next(self._numbers), kind, settings)).result(_INVENTORY_TIMEOUT)
                self._inventories[kind] = reply.inventory or reply.error
            except PlaceError as error:
                self._inventories[kind] = str(error)
            except futures.TimeoutError:
                self._inventories[kind] = f"its agent did not answer within {_INVENTORY_TIMEOUT:g} s"
        found = self._inventories[kind]
        if isinstance(found, str):
            return f"the {kind} devices of {self._machine} cannot be looked up: {found}"
        return found

    async def lease(
        self, demand: WorldDemand, need: DeviceNeed, mask: str | None, on_wanted: Callable[[], object]
    ) -> RemoteLease:
        """Wait for a lease, and return it. Raise :class:`PlaceError` or `UnfitDevicesError` if there will be none.

        `on_wanted` is called, here or later, when another session waits for the devices.
        """
        number = next(self._numbers)
        lease = self._leases[number] = RemoteLease(number, on_wanted)
        assert self._settings is not None
        try:
            reply = await wrap_future(self._ask(LeaseRequest(number, self._settings, demand, need, mask)))
            if reply.error:
                raise (UnfitDevicesError if reply.unfit else PlaceError)(f"{reply.error} (on {self._machine})")
        except BaseException:
            self.give_back(lease, killed=False)
            raise
        lease.devices = reply.devices
        return lease

    def give_back(self, lease: RemoteLease, *, killed: bool) -> None:
        """Return a lease. `killed` says whether processes that used the devices were killed."""
        if self._leases.pop(lease.number, None) is not None:
            self._send(ReturnLease(lease.number, killed))

    # The thread

    def _run(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    self._handle(decode(self._connection.recv_bytes(), ToDriver))
        finally:  # After any error, too: otherwise a caller that waits for the server would wait forever.
            self._connection_ended()

    def _handle(self, message: ToDriver) -> None:
        if isinstance(message, ServerEnded):
            if message.log and self._spec is not None:
                path = server_log_path(self._spec.directory, self._spec.server)
                with suppress(OSError), open(path, "w", encoding="utf-8") as log:
                    log.write(message.log)
            self._server_ended.set()
        elif isinstance(message, Reply):
            answer = self._asked.pop(message.number, None)
            if answer is not None and answer.set_running_or_notify_cancel():
                answer.set_result(message)
        elif isinstance(message, LeaseWanted):
            lease = self._leases.get(message.number)
            with suppress(RuntimeError):  # The pool is closed.
                if lease is not None:
                    lease.loop.call_soon_threadsafe(lease.notify)
        elif isinstance(message, Ending):
            self._ending.set()
        else:
            self.machine_loss = message.why

    def _connection_ended(self) -> None:
        if self._stands_for_machine:
            self.machine_loss = self.machine_loss or "its agent has ended"
        self.lost = True
        try:
            self._on_lost()  # First: a request that is repeated because of the loss must not get this machine.
        finally:
            self._fail_requests()
            self._ending.set()
            self._server_ended.set()
