"""A session on a Ray cluster, as its controller sees it: the helper process, the machines, and the starter of ranks.

A world first gets a place from the helper, and then the locks of its devices there.
"""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
import sys
import tempfile
from asyncio import Future, get_running_loop, shield, wait_for
from asyncio import TimeoutError as WaitTimeoutError
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from socket import SHUT_RDWR

from pytest_accel.compat import loop_tasks
from pytest_accel.core.interpreter import python_command, unmeasured
from pytest_accel.core.signals import signal_name
from pytest_accel.core.truncation import read_end
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.launchers.agent_client import AgentClient
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.machine_link import DriverLink
from pytest_accel.features.launchers.machines_starter import MachinesTaken, RankMachine, StarterOnMachines
from pytest_accel.features.launchers.rendezvous import own_interfaces
from pytest_accel.features.ray.ray_messages import (
    AgentEnded,
    AgentStarted,
    Connected,
    Invitation,
    PlaceFailed,
    PlaceReserved,
    PlaceWaits,
    ReleasePlace,
    RequestPlace,
    ToController,
    ToHelper,
)
from pytest_accel.features.ray.ray_resources import RayMachine
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection, socket_of
from pytest_accel.messages.world_spec import LOOPBACK, WorldSpec
from pytest_accel.pool.starter import LocalStarter, LostPlaceError, StarterReports
from pytest_accel.settings.options import Settings

_CONNECT_TIMEOUT = 60
"""Seconds in which the cluster must answer. Ray itself tries for half a minute to reach a head that does not answer."""
_JOIN_TIMEOUT = 120.0
"""Seconds in which the agent of a node of a place must join: Ray starts processes for this."""
_CLOSE_TIMEOUT = 10.0
"""Seconds that the helper may take to give everything back to Ray. After that it is killed.

Ray then takes everything back by itself, some seconds later.
"""
_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds after which Ray ends the helper if the cluster's head is lost; Ray's default is a minute.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
_TAIL = 2_000
"""Number of bytes at the end of the helper's output that are shown if it ends: the last error of Ray's native code."""


class RayCluster:
    """The Ray cluster on which a session runs its tests. The `AccelSession` of the controller owns it."""

    def __init__(self, settings: Settings, own: Machine, rootdir: str) -> None:
        """Connect to the cluster of ``--accel-cluster``; raise :class:`PlaceError` if that is not possible.

        `own` is this machine. `rootdir` is the suite's root directory, with the same files on all machines.
        """
        self.settings = settings
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 The helper writes to it as long as it runs.
        self._process, self.connection = self._start((settings.cluster or "").partition(":")[2] or "auto", rootdir)
        try:
            found = self._connect()
        except BaseException:
            self.close()
            raise
        self.machine = RayMachine(settings.accel, found.nodes, own, can_scale=found.can_scale)

    def _start(self, address: str, rootdir: str) -> tuple[subprocess.Popen[bytes], Connection]:
        """Start the helper; return its process and the connection to it."""
        ours, theirs = unix_sockets.pair()
        unix_sockets.limit_writes(ours)
        arguments = f"{theirs.fileno()}, {os.getpid()}, {address!r}, {rootdir!r}"
        source = f"from pytest_accel.features.ray.ray_process import main; main({arguments})"
        with theirs:
            process = subprocess.Popen(
                python_command(source, path=sys.path),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**unmeasured(os.environ), **_RAY_SETTINGS},
                cwd="/",  # Ray adds the working directory to sys.path on the nodes.
                start_new_session=True,  # Ctrl-C at the terminal must interrupt the driver only.
            )
        return process, Connection(ours.detach())

    def _connect(self) -> Connected:
        """Wait until the helper is connected."""
        if not unix_sockets.is_readable(self.connection.fileno(), _CONNECT_TIMEOUT):
            raise PlaceError(f"the Ray cluster did not answer within {_CONNECT_TIMEOUT} s{self._output()}")
        try:
            message: Connected = decode(self.connection.recv_bytes(), Connected)
        except (EOFError, OSError):
            raise PlaceError(
                f"the process that connects to the Ray cluster {self._wait()}; pytest's machine must be a node of the "
                "cluster (ray start --address=HOST:PORT)"
            ) from None
        if message.error:
            raise PlaceError(message.error)
        return message

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> ClusterStarter:
        """Return the starter of ranks on the nodes of the cluster."""
        return ClusterStarter(spec, here, reports, self)

    def loss(self) -> str:
        """Return why no request can be met any more, once the helper has closed the connection."""
        return f"the connection to the Ray cluster is lost{self._output()}"

    def kill(self) -> None:
        """Kill the helper."""
        self._process.kill()

    def close(self) -> None:
        """Give everything back to Ray, and end the helper. The pool must have been closed."""
        # The connection may also be open in a process that a test has forked.
        with self.connection, socket_of(self.connection) as end, suppress(OSError):
            end.shutdown(SHUT_RDWR)
        self._wait()
        self._log.close()

    def _wait(self, timeout: float = _CLOSE_TIMEOUT) -> str:
        """Wait for the exit of the helper, whose connection has ended, and return how it has ended."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:  # Ray does not shut down in it.
            self._process.kill()
            status = self._process.wait()
        return (
            f"was killed by {signal_name(-status)}" if status < 0 else f"exited with status {status}"
        ) + self._output()

    def _output(self) -> str:
        """Return the end of the helper's output, after a colon; empty if there is none."""
        text = read_end(self._log.fileno(), longest=_TAIL).strip()
        return f":\n{text}" if text else ""


@dataclass(eq=False)
class PlaceTaken(MachinesTaken):
    """The place of a world, or the request for it, and the leases on the devices of each machine."""

    number: int = 0
    placed: Future[PlaceReserved] = field(default_factory=lambda: get_running_loop().create_future())
    why: str = ""
    """Why the request waits; empty if it may get a place at once."""
    waiting: Mapping[int, PlaceTaken] = field(default_factory=dict)
    """The requests of the session that wait for a place."""

    @property
    def wanted(self) -> bool:
        """True if another request waits for devices or for a place."""
        return any(other.why for other in self.waiting.values()) or super().wanted


class ClusterStarter(StarterOnMachines[PlaceTaken]):
    """The starter of ranks on the nodes of a cluster, whose agents join while the session runs.

    The agents connect to a TCP port of the controller, which admits those that know the session's random key. A lost
    machine keeps its number, and its entry in `machines`.
    """

    def __init__(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports, cluster: RayCluster) -> None:
        super().__init__(spec, here, [RankMachine(platform.node(), "")], {}, reports)
        self._cluster = cluster
        self._loop = get_running_loop()
        self._failure: str | None = None
        """Why no request can be met any more; None as long as the helper runs."""
        self._ids = count(1)
        self._placing: dict[int, PlaceTaken] = {}
        """The requests that wait for a place, by number."""
        self._joined: dict[int, Future[None]] = {}
        """Done once the agent of a machine has joined; a LostPlaceError if it may not join any more."""
        key = secrets.token_bytes(32)
        self._link = DriverLink(key, 0, partial(self._post, self._admit))
        self._link.on_lost = partial(self._post, self._report_lost)
        self._loop.add_reader(cluster.connection, self._receive)
        # Loopback is last: it reaches the controller only from the same machine, which may have no other address.
        addresses = (*(address for _, address in own_interfaces()), LOOPBACK)
        self._send(Invitation(addresses, self._link.port, key.hex()))

    def serves(self, key: WorldKey) -> bool:
        return key.in_cluster

    def warm(self) -> None:
        self._here.warm()  # The machines of the cluster are unknown until Ray has chosen them.

    def keeps(self, key: WorldKey) -> bool:
        return True

    async def take(self, demand: WorldDemand) -> PlaceTaken:
        taken = PlaceTaken(demand, number=next(self._ids), waiting=self._placing)
        place = await self._place(taken)
        masks = {machine: ",".join(devices) for machine, devices in place.devices.items()}
        return await self._lease(taken, demand.key.needs(place.machines), masks)

    async def _place(self, taken: PlaceTaken) -> PlaceReserved:
        """Wait for a place on the cluster, and for the agents of its machines."""
        if self._failure is not None:
            raise PlaceError(self._failure)
        self._placing[taken.number] = taken
        try:
            self._send(RequestPlace(taken.number, taken.demand.key))
            place = await taken.placed
            taken.why = ""
            for machine in dict.fromkeys(place.machines):
                await self._await_agent(machine)
            return place
        except BaseException:
            self._send(ReleasePlace(taken.number))  # The request may have got a place at this moment.
            raise
        finally:
            del self._placing[taken.number]

    def waiting(self, demand: WorldDemand) -> tuple[str, list[str]] | None:
        for placing in self._placing.values():
            if placing.demand is demand:
                return ("a place on the cluster", [placing.why]) if placing.why else None
        return super().waiting(demand)

    def hand_on(self, taken: PlaceTaken) -> WorldDemand | None:
        for placing in self._placing.values():
            if placing.demand.key == taken.demand.key and not placing.placed.done():
                placing.placed.cancel()
                return placing.demand
            if placing.why:
                return None
        return None

    def _return(self, taken: PlaceTaken, *, killed: bool) -> None:
        super()._return(taken, killed=killed)
        self._send(ReleasePlace(taken.number))

    def place(self, spec: WorldSpec, taken: PlaceTaken) -> WorldSpec:
        return self._on_machines(spec, taken, taken.placed.result().machines)

    async def stop(self) -> bool:
        stopped = await super().stop()
        self._loop.remove_reader(self._cluster.connection)
        for client in self._clients.values():
            client.end(0)
        self._link.close()
        return stopped

    # The conversation with the helper

    def _send(self, message: ToHelper) -> None:
        try:
            self._cluster.connection.send_bytes(encode(message))
        except OSError:  # The helper has ended, or does not read, and may have got a part of the message.
            self._cluster.kill()

    def _receive(self) -> None:
        try:
            message: ToController = decode(self._cluster.connection.recv_bytes(), ToController)
        except (EOFError, OSError):
            self._loop.remove_reader(self._cluster.connection)
            self._failure = self._cluster.loss()
            for placing in self._placing.values():
                loop_tasks.fail(placing.placed, PlaceError(self._failure))
            for joined in self._joined.values():  # Ray ends the agents that have not joined yet.
                loop_tasks.fail(joined, LostPlaceError(self._failure))
            return
        match message:
            case AgentStarted(name, address):
                self._machines.append(RankMachine(name, address))
            case AgentEnded(machine, reason):
                loop_tasks.fail(self._join_of(machine), LostPlaceError(reason))
            case PlaceReserved(request_id) | PlaceWaits(request_id) | PlaceFailed(request_id):
                found = self._placing.get(request_id)
                if found is not None and not found.placed.done():  # Else it was cancelled, and its place is given back.
                    self._answer(found, message)

    def _answer(self, placing: PlaceTaken, answer: PlaceReserved | PlaceWaits | PlaceFailed) -> None:
        match answer:
            case PlaceReserved():
                placing.placed.set_result(answer)
            case PlaceWaits(_, reason):
                placing.why = reason
                self._reports.give_up_wanted()  # Only the cluster knows which worlds are in the way.
            case PlaceFailed(_, reason, is_lost):
                loop_tasks.fail(placing.placed, (LostPlaceError if is_lost else PlaceError)(reason))

    # The agents

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        """Have `call` called in the loop of the pool. Called in the thread of the link."""
        with suppress(RuntimeError):  # The pool is closed.
            self._loop.call_soon_threadsafe(call, *arguments)

    def _join_of(self, machine: int) -> Future[None]:
        """Return the future in `_joined` of a machine."""
        return self._joined.setdefault(machine, self._loop.create_future())

    async def _await_agent(self, machine: int) -> None:
        """Wait until the agent of a machine has joined. Raise LostPlaceError if it does not."""
        if self._failure is not None:
            raise PlaceError(self._failure)
        try:
            await wait_for(shield(self._join_of(machine)), _JOIN_TIMEOUT)
        except WaitTimeoutError:
            why = f"the agent on {self._machines[machine].name} was not started by Ray in {_JOIN_TIMEOUT:g} s"
            self._send(AgentEnded(machine, why))
            raise LostPlaceError(why) from None

    def _admit(self, agent: str, hello: Hello) -> None:
        """Admit the agent of a machine, unless one has joined for it, or may not join any more."""
        machine = hello.rank
        if not self._join_of(machine).done():
            settings = self._cluster.settings
            client = AgentClient(self._link, agent, hello.host, settings, stands_for_machine=True)
            self._clients[machine] = client
            self._join_of(machine).set_result(None)

    def _report_lost(self) -> None:
        """Tell the helper which agents are lost; no-op if it knows that."""
        for machine, client in self._clients.items():
            if client.lost:
                self._send(AgentEnded(machine, "the controller has lost it"))
