"""The agent of a machine: a launched process other than rank 0, or on a cluster. Its fork server forks ranks.

The agent is not a rank itself. So the launcher sees no process exit when a rank dies or hangs, and the world can be
replaced as without a launcher. The agent prints nothing, except an error of its connection to the driver. It has a
session's folder of its own, and leases devices of its machine for the driver. Each request is a connection of its own
(`agent_messages`).

In a session on several machines, each launched process but rank 0 is an agent. The driver uses one on each machine; the
others wait for the end.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from traceback import format_exc
from typing import Any

from msgspec import structs

from pytest_accel.compat import loop_tasks
from pytest_accel.core import processes, session_folder, threads
from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.kinds import PJRT_DEVICE
from pytest_accel.core.log import step
from pytest_accel.core.processes import KILL_TIMEOUT, kill_marked
from pytest_accel.core.session_folder import rank_path, server_log_path
from pytest_accel.core.truncation import tail
from pytest_accel.diagnostics.inspector import answer
from pytest_accel.features.launchers.agent_messages import (
    End,
    KillServer,
    LeaseReply,
    LeaseRequest,
    StartServer,
    WatchServer,
)
from pytest_accel.features.launchers.machine_link import AgentLink, Target
from pytest_accel.features.launchers.rendezvous import DRIVER_LOST, EXIT_TIMEOUT, ignore_interrupts, use_cores
from pytest_accel.forkserver.server_process import OwnServer, spawn_here
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import shortfall
from pytest_accel.leases.leases import Leases
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.connect import Inspection, RankTarget
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.settings.options import Settings, machine_for


class Agent:
    """The agent's state: its current fork server, the server's folder, the leases, and the exit status.

    All runs in the loop of the link, except the inspector and the wait for the fork server, which take long.
    """

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._loop = link.loop
        self._loop.set_exception_handler(self._fail)
        self._over: asyncio.Future[str | None] = self._loop.create_future()
        """Set once the connection to the driver has ended, with an error that only this end knows, or None."""
        self._server: OwnServer | None = None
        """The last fork server."""
        self._spec: SessionSpec | None = None
        """The session's data for the last fork server, with the folder that it uses."""
        self._status = DRIVER_LOST
        """The exit status."""
        self._leases: Leases | None = None
        """The leases of this machine's devices."""
        self._tasks: set[asyncio.Task[None]] = set()
        link.serve(self._open_target, self._finish)

    def run(self) -> int:
        """Serve the driver until it exits; return the exit status for this process."""
        ignore_interrupts()
        step("serves the driver")
        try:
            why = self._loop.run_until_complete(self._over)
            step("the connection to the driver has ended%s", "" if why is None else f": {why}")
            if why is not None:
                print(f"accel: the connection to the driver has ended: {why}", file=sys.stderr, flush=True)
            return self._status
        finally:
            self._close()

    def _close(self) -> None:
        """Wait for the fork server, which exits since its connection is closed, and clean up after it."""
        self._link.disconnect()
        if self._server is not None and not self._server.wait(EXIT_TIMEOUT):
            self._server.kill()
            self._server.wait(KILL_TIMEOUT)
        self._loop.run_until_complete(self._end_tasks())
        if self._leases is not None:
            self._leases.close()
        self._link.close()
        step("ends")
        self._remove_folder()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _finish(self, why: str | None = None) -> None:
        if not self._over.done():
            self._over.set_result(why)

    def _fail(self, loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, PlaceError):  # A lock was lost.
            self._finish(str(error))
        else:
            self._finish(f"an error at this end of it: {context['message']} {error!r}")

    # Connections of the driver

    def _open_target(self, target: Target) -> socket.socket:
        """See :meth:`AgentLink.serve`."""
        if isinstance(target, RankTarget):
            rank = unix_sockets.connect(rank_path(self._directory, target.world, target.rank, "sock"))
            self._end_with(target.pid, rank)
            return rank
        if isinstance(target, StartServer):
            return self._start(target)
        ours, end = unix_sockets.pair()
        call = Connection(end.detach())
        if isinstance(target, Inspection):
            threads.start(answer, "accel-inspector", call, self._directory, target)
        elif isinstance(target, WatchServer):
            threads.start(self._watch, "accel-wait", self._server, self._spec, call)
        elif isinstance(target, LeaseRequest):
            self._start_task(self._lease(target, call), call)
        else:
            with call:
                self._obey(target)
        return ours

    def _end_with(self, pid: int, rank: socket.socket) -> None:
        """Have the connection to a rank end with the rank: a child of it may still hold the socket open."""
        if (exit := processes.end_of(pid)) is None:
            return

        def on_exit() -> None:
            self._loop.remove_reader(exit)
            os.close(exit)
            with suppress(OSError):  # The connection has ended.
                rank.shutdown(socket.SHUT_RDWR)  # Data that the rank has written can still be read.

        self._loop.add_reader(exit, on_exit)

    @property
    def _directory(self) -> str:
        if self._spec is None:
            raise FileNotFoundError("no fork server has been started")
        return self._spec.directory

    def _obey(self, message: KillServer | End) -> None:
        if isinstance(message, End):
            self._status = message.status
            step("the driver ends with status %d", message.status)
            # The driver's exit ends the connection. A launcher terminates all processes if another one exits first.
            self._loop.call_later(EXIT_TIMEOUT, self._finish)
        elif self._server is not None:
            step("kills its fork server, as the driver wants")
            self._server.kill()

    def _start_task(self, work: Coroutine[object, object, None], call: Connection) -> None:
        """Start a task that uses `call`, and is cancelled when the driver closes `call`."""

        def on_end(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            self._loop.remove_reader(call)
            call.close()

        task = self._loop.create_task(work)
        self._tasks.add(task)
        self._loop.add_reader(call, task.cancel)
        task.add_done_callback(on_end)

    # The fork server

    def _start(self, message: StartServer) -> socket.socket:
        """Start a fork server, and return the connection to it. Raise OSError if that is impossible."""
        self._server = None
        try:
            use_cores(message.cores)
            self._spec = self._own_spec(message)
            self._server, connection = spawn_here(self._spec)
        except Exception as error:
            self._finish(f"it cannot start a fork server\n{format_exc()}")
            raise OSError(str(error)) from error
        step("starts fork server %d: process %d", self._spec.server, self._server.process.pid)
        return connection

    def _own_spec(self, message: StartServer) -> SessionSpec:
        """Return the session's data for a server on this machine, with a new folder."""
        self._remove_folder()
        session_folder.remove_dead()
        directory = session_folder.create()
        shared = os.path.exists(message.token)
        basetemp = message.spec.basetemp if shared else os.path.join(directory, "tmp")
        return structs.replace(
            message.spec, directory=directory, basetemp=basetemp, remote=True, clock=self._link.clock, shared=shared
        )

    def _watch(self, server: OwnServer | None, spec: SessionSpec, call: Connection) -> None:
        """Wait for the end of the fork server, clean up after it, and send the end of its log.

        Processes that were started by ranks and outlived them are killed, too.
        """
        with call, suppress(OSError):  # The driver may have closed the connection.
            if server is not None:
                server.wait(None)
                step("fork server %d has exited: status %s", spec.server, server.process.returncode)
                kill_marked(spec.directory)
                call.send_bytes(tail(server_log_path(spec.directory, spec.server)).encode(errors="replace"))

    def _remove_folder(self) -> None:
        if self._spec is not None:
            kill_marked(self._spec.directory)
            session_folder.remove(self._spec.directory)

    # The leases, with the locks of this machine

    def _use(self, settings: Settings) -> Leases:
        """Return the leases, of the devices that the first settings describe."""
        if self._leases is None:
            machine, waits = machine_for(settings), settings.busy == "wait"
            # The driver keeps devices of other machines until it needs them itself, whoever else waits for them.
            self._leases = Leases(machine, 0, lambda: None, waits_for_busy=waits)
            self._tasks.add(loop_tasks.start(self._leases.run()))
        return self._leases

    async def _lease(self, message: LeaseRequest, call: Connection) -> None:
        """Take a lease, tell the driver its devices, or why there is none, and keep it until this is cancelled."""
        # The lock file must name a process of this machine, for the other sessions here.
        demand = structs.replace(message.demand, holder=replace(message.demand.holder, pid=os.getpid()))
        try:
            leases, only = self._use(message.settings), None
            if message.mask is not None:
                only = shown_devices(leases.machine, demand.key.kind, message.mask, message.need)
            elif (missing := shortfall(message.need, leases.machine.of(demand.key.kind))) is not None:
                raise PlaceError(missing)
            lease = await leases.take(demand, need=message.need, only=only)
        except Exception as error:
            _send(call, LeaseReply(error=str(error) if isinstance(error, PlaceError) else format_exc()))
            return
        try:
            _send(call, LeaseReply(lease.devices))
            await self._loop.create_future()
        finally:
            # The driver may have killed the processes that used the devices.
            leases.give_back(lease, killed=True)


def _send(call: Connection, message: LeaseReply) -> None:
    with suppress(OSError):  # The driver has closed the connection.
        call.send_bytes(encode(message))


def shown_devices(machine: Machine, kind: str, mask: str, need: DeviceNeed) -> frozenset[str]:
    """Return the ids of the devices of this `machine` that `mask` shows, as a process without a mask numbers them.

    Raise :class:`PlaceError` if they do not suffice for `need`.
    """
    vendor, inventory = machine.vendor(kind), machine.of(kind)
    variable = next((name for name in vendor.mask_variables if name != PJRT_DEVICE), None)
    if variable is None:
        raise PlaceError(f"{kind} devices have no mask, by which a cluster could name them")
    # The other variables may set the order in which the mask counts devices (CUDA_DEVICE_ORDER).
    environ = {name: value for name, value in os.environ.items() if name not in vendor.mask_variables}
    names = frozenset(device.id for device in vendor.visible(vendor.discover(), {**environ, variable: mask}))
    shown = replace(inventory, devices=tuple(device for device in inventory.devices if device.id in names))
    if (missing := shortfall(need, shown)) is not None:
        raise PlaceError(f"the cluster has reserved {variable}={mask}, but the test {missing}")
    return names
