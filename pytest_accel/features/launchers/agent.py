"""The agent of a launched process other than rank 0, or of a cluster's machine. Its fork server forks ranks.

The agent is not a rank itself. So the launcher sees no process exit when a rank dies or hangs, and the world can be
replaced as without a launcher. The agent prints nothing, except an error of its connection to the driver.

An agent on the driver's machine uses the session's folder. An agent on another machine has a folder of its own, and
leases devices of its machine for the driver. All of it runs in one thread with an asyncio loop.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from traceback import format_exc
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from pytest_accel.core import loop_tasks, prctl, session_folder, threads
from pytest_accel.core.kill import KILL_TIMEOUT, kill_marked
from pytest_accel.core.log import step
from pytest_accel.core.paths import server_log_path, socket_path
from pytest_accel.core.truncation import tail
from pytest_accel.diagnostics.inspector import answer
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
)
from pytest_accel.forkserver.server_process import OwnServer, spawn_here
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.leases import HeldLease, Leases, UnfitDevicesError
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages import fd_passing, unix_sockets
from pytest_accel.messages.connect import RankTarget
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings

if TYPE_CHECKING:
    from pytest_accel.features.launchers.machine_link import AgentLink, Target

_DRIVER_LOST = 1
"""Exit status of an agent whose driver has exited without sending `End`."""
_EXIT_TIMEOUT = 30.0
"""Seconds that a driver may take to exit after it has sent `End`, and a fork server after the loss of its driver."""


def serve_driver(driver: Connection | AgentLink, hello: Struct, until: int | None = None) -> int:
    """Greet the driver with `hello`, and serve it until it exits; return the exit status for this process.

    The service also ends once the descriptor `until` becomes readable.
    """
    # The driver handles a Ctrl-C at the terminal. Ranks would inherit that a signal is ignored, but no handler.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)
    return _Agent(driver).run(hello, until)


class _Agent:
    """The agent's state: its current fork server, the server's folder, the leases, and the exit status."""

    def __init__(self, driver: Connection | AgentLink) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(lambda loop, context: self._fail(context))
        self._link = None if isinstance(driver, Connection) else driver
        self._connection = driver if isinstance(driver, Connection) else driver.start(self._open_target)
        self._over: asyncio.Future[str | None] = self._loop.create_future()
        """Set once the connection to the driver has ended, with an error that only this end knows, or None."""
        self._server: OwnServer | None = None
        self._spec: SessionSpec | None = None
        """The session's data for the last server, with the folder that it uses."""
        self._end: End | None = None
        """The driver's last message."""
        self._owns_folder = self._link is not None
        self._leases: tuple[Machine, Leases] | None = None
        self._looking: asyncio.Task[None] | None = None
        """Looks after the leases."""
        self._requests: dict[int, asyncio.Task[None]] = {}
        """The requests for leases that wait, by number."""
        self._granted: dict[int, HeldLease] = {}
        """The leases by number, from their grant until they are returned."""

    def run(self, hello: Struct, until: int | None) -> int:
        """Handle messages until the driver exits; return the exit status."""
        self._send(hello)
        step("serves the driver")
        self._loop.add_reader(self._connection.fileno(), self._receive)
        if until is not None:
            self._loop.add_reader(until, self._finish)
        try:
            why = self._loop.run_until_complete(self._over)
            step("the connection to the driver has ended%s", "" if why is None else f": {why}")
            if why is not None:
                print(f"accel: the connection to the driver has ended: {why}", file=sys.stderr, flush=True)
            if self._end is None:
                # The driver's fork server removes the folder, but ranks of this agent may write files there afterwards.
                self._owns_folder = True
                return _DRIVER_LOST
            # The driver exits first: a launcher that sees another exit status than 0 terminates all processes. Its
            # connection on this machine ends before the launcher can see its exit status.
            if self._link is None and (exit := prctl.end_of(self._end.driver)) is not None:
                select.select([exit], [], [], _EXIT_TIMEOUT)
                os.close(exit)
            return self._end.status
        finally:
            self._close()

    def _close(self) -> None:
        """Wait for the fork server, which exits since its connection is closed, and clean up after it."""
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        if self._link is not None:
            self._link.close()
        if self._server is not None and not self._server.wait(_EXIT_TIMEOUT):
            self._server.kill()
            self._server.wait(KILL_TIMEOUT)
        self._loop.run_until_complete(self._end_leases())
        self._loop.close()
        step("ends")
        if self._owns_folder:
            self._remove_folder()

    def _finish(self, why: str | None = None) -> None:
        if not self._over.done():
            self._over.set_result(why)

    def _fail(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._finish(f"an error at this end of it: {context['message']} {error!r}")

    # The conversation with the driver

    def _send(self, message: Struct) -> None:
        with suppress(OSError):  # The driver has exited, which `_receive` notices.
            self._connection.send_bytes(encode(message))

    def _receive(self) -> None:
        try:
            message: ToAgent = decode(self._connection.recv_bytes(), ToAgent)
            if isinstance(message, StartServer):
                self._start(message, socket.socket(fileno=fd_passing.receive(self._connection, 1)[0]))
                return
        except (EOFError, OSError):
            self._finish()
            return
        if isinstance(message, KillServer):
            if self._server is not None:
                step("kills its fork server, as the driver wants")
                self._server.kill()
        elif isinstance(message, InventoryRequest):
            self._send_inventory(message)
        elif isinstance(message, LeaseRequest):
            task = self._requests[message.number] = self._loop.create_task(self._lease(message))
            task.add_done_callback(lambda done: self._requests.pop(message.number))
        elif isinstance(message, ReturnLease):
            self._return_lease(message)
        else:
            self._end = message
            step("the driver ends with status %d", message.status)
            self._send(Ending())
            self._loop.call_later(_EXIT_TIMEOUT, self._finish)  # The driver's exit ends the connection.

    def _open_target(self, target: Target) -> tuple[socket.socket, int | None]:
        """See :meth:`AgentLink.start`."""
        if isinstance(target, StartServer):
            ours, end = unix_sockets.pair()
            self._loop.call_soon_threadsafe(self._start, target, end)
            return ours, None
        if self._spec is None:
            raise FileNotFoundError(target)
        if isinstance(target, RankTarget):
            path = socket_path(self._spec.directory, target.world, target.rank)
            return unix_sockets.connect(path), prctl.end_of(target.pid)
        ours, end = unix_sockets.pair()
        threads.start(answer, "accel-inspector", Connection(end.detach()), self._spec.directory)
        return ours, None

    # The fork server

    def _start(self, message: StartServer, end: socket.socket) -> None:
        """Start a fork server whose end of its connection to the driver is `end`, which this closes."""

        def wait(server: OwnServer, spec: SessionSpec) -> None:
            server.wait(None)
            with suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(self._server_ended, server, spec)

        try:
            self._spec = message.spec if self._link is None else self._own_spec(message, self._link.clock)
            with end:
                self._server = spawn_here(self._spec, end, changed_environment(message.environment))
        except Exception as error:
            step("cannot start a fork server: %r", error)
            self._send(ServerEnded(format_exc()))
        else:
            step("starts fork server %d: process %d", self._spec.server, self._server.process.pid)
            threads.start(wait, "accel-wait", self._server, self._spec)

    def _own_spec(self, message: StartServer, clock: float) -> SessionSpec:
        """Return the session's data for a server on another machine than the driver's, with a new folder."""
        self._remove_folder()
        session_folder.remove_dead()
        directory = session_folder.create()
        shared = os.path.exists(message.token)
        basetemp = message.spec.basetemp if shared else os.path.join(directory, "tmp")
        return structs.replace(
            message.spec, directory=directory, basetemp=basetemp, remote=True, clock=clock, shared=shared
        )

    def _server_ended(self, server: OwnServer, spec: SessionSpec) -> None:
        """Clean up after the fork server, which has exited, and tell the driver.

        On another machine than the driver's, processes that were started by ranks and outlived them are killed, too.
        """
        step("fork server %d has exited: status %s", spec.server, server.process.returncode)
        if self._server is server:
            self._server = None
        log = ""
        if self._link is not None:
            kill_marked(spec.directory)
            log = tail(server_log_path(spec.directory, spec.server))
        self._send(ServerEnded(log))

    def _remove_folder(self) -> None:
        if self._spec is None:
            return
        if self._link is not None:
            kill_marked(self._spec.directory)
        session_folder.remove(self._spec.directory)

    # The leases, with the locks of this machine

    def _use(self, settings: Settings) -> tuple[Machine, Leases]:
        """Return the machine and its leases, which the first settings describe."""
        if self._leases is None:
            machine, waits = machine_for(settings), settings.busy == "wait"
            self._leases = machine, Leases(machine, 0, self._wanted, self._lost, waits_for_busy=waits)
            self._looking = loop_tasks.start(self._leases[1].run())
        return self._leases

    def _send_inventory(self, message: InventoryRequest) -> None:
        try:
            self._send(Reply(message.number, self._use(message.settings)[0].of(message.kind)))
        except Exception as error:
            self._send(Reply(message.number, error=str(error)))

    async def _lease(self, message: LeaseRequest) -> None:
        """Take a lease, and tell the driver its devices, or why there is none."""
        number = message.number
        # The lock file must name a process of this machine, for the other sessions here.
        demand = structs.replace(message.demand, holder=replace(message.demand.holder, pid=os.getpid()))
        try:
            _, leases = self._use(message.settings)
            lease = self._granted[number] = await leases.take(demand, need=message.need, mask=message.mask)
        except PlaceError as error:
            self._send(Reply(number, error=str(error), unfit=isinstance(error, UnfitDevicesError)))
        except Exception:
            self._send(Reply(number, error=format_exc()))
        else:
            self._send(Reply(number, devices=lease.devices))

    def _return_lease(self, message: ReturnLease) -> None:
        if message.number in self._granted and self._leases is not None:
            self._leases[1].give_back(self._granted.pop(message.number), killed=message.killed)
        elif message.number in self._requests:
            self._requests[message.number].cancel()

    def _wanted(self, lease: HeldLease) -> None:
        for number, one in self._granted.items():
            if one is lease:
                self._send(LeaseWanted(number))

    def _lost(self, lease: HeldLease, why: str) -> None:
        self._finish(why)  # The ranks end with this process.

    async def _end_leases(self) -> None:
        tasks = [*self._requests.values(), *([] if self._looking is None else [self._looking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._leases is not None:
            self._leases[1].close()


def changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment with `changes`; None removes a variable."""
    environment = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    return {name: value for name, value in environment.items() if changes.get(name, "") is not None}
