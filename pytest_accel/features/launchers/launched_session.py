"""The driver's side of a session under a launcher: the other launched processes, and the clients of their agents."""

from __future__ import annotations

import os
import platform
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core import log
from pytest_accel.core.kinds import OWN_KINDS
from pytest_accel.core.launcher_env import LauncherEnv, of_a_rank, without_local_rank
from pytest_accel.core.log import step
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.features.launchers import agent, local_rendezvous, tcp_rendezvous
from pytest_accel.features.launchers.agent_client import AgentClient, ClientTransport, EnvironmentChanges
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.local_rendezvous import RendezvousError
from pytest_accel.features.launchers.local_transport import LocalAgentTransport, LocalClientTransport
from pytest_accel.features.launchers.machines_starter import MachinesStarter
from pytest_accel.features.launchers.remote_leases import RemoteDevicesError, RemoteLeases
from pytest_accel.features.launchers.tcp_rendezvous import Rendezvous
from pytest_accel.forkserver.server_process import Spawn
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.starter import StarterReports
from pytest_accel.settings.options import Settings

if TYPE_CHECKING:
    from pytest_accel.features.launchers.driver_link import DriverLink, RemoteAgent

_LOSS_TIMEOUT = 0.5
"""Seconds to wait, after SIGTERM from the launcher, until the loss of another process is noticed.

The session must end before the launcher sends SIGKILL: Open MPI does so after 1 s (``odls_base_sigkill_timeout``),
torchrun after 30 s.
"""


def enter(early_config: pytest.Config, args: list[str], process: LauncherEnv) -> LaunchedSession:
    """Meet the other launched processes; return the session in rank 0, and raise ``SystemExit`` in all others.

    The other processes run as agents until the driver ends. `args` is pytest's own list of the arguments that it has
    not parsed yet. Raise ``pytest.UsageError`` if the processes differ in their arguments, folders or devices.
    """
    log.start(f"process {process.rank} of {process.launcher}")
    step("is one of %d processes, %d of them on this machine", process.size, process.local_size)
    args[:] = without_local_rank(args)
    rendezvous = None
    if process.local_size != process.size:
        try:
            rendezvous = tcp_rendezvous.read_rendezvous(os.environ, process)
        except RendezvousError as error:
            step("cannot join: %s", error)
            raise pytest.UsageError(str(error)) from None
    given = tuple(without_local_rank([str(arg) for arg in early_config.invocation_params.args]))
    where = str(early_config.invocation_params.dir)
    root = str(early_config.rootpath)
    machine = tcp_rendezvous.machine_identity() if rendezvous is not None else ""
    hello = Hello(process.rank, os.getpid(), given, where, root, _masks(), platform.node(), machine)
    for name in of_a_rank(os.environ):
        del os.environ[name]  # This process is not a rank of a world; each world sets its own values.
    try:
        if process.rank != 0:
            raise SystemExit(_run_agent(process, hello, rendezvous))
        session = _gather(process, hello, rendezvous)
    except RendezvousError as error:
        step("cannot join: %s", error)
        raise pytest.UsageError(str(error)) from None
    step("all processes are connected")
    difference = find_difference(process.launcher, [hello, *session.hellos])
    if difference is not None:
        step("ends: %s", difference)
        session.end(int(pytest.ExitCode.USAGE_ERROR))
        raise pytest.UsageError(difference)
    return session


def _gather(process: LauncherEnv, hello: Hello, rendezvous: Rendezvous | None) -> LaunchedSession:
    """Wait for the other processes, in rank 0; raise :class:`RendezvousError` if some are missing."""
    if rendezvous is None:
        return LaunchedSession(process, hello, local_rendezvous.gather(process, range(1, process.size)), [], None)
    link = tcp_rendezvous.listen(process, rendezvous)
    try:
        remote, local = tcp_rendezvous.gather(process, link, hello)
        return LaunchedSession(process, hello, local_rendezvous.gather(process, local), remote, link)
    except RendezvousError:
        link.close()
        raise


def _run_agent(process: LauncherEnv, hello: Hello, rendezvous: Rendezvous | None) -> int:
    """Connect to rank 0 and run as its agent until the driver ends; return the exit status for this process."""
    if rendezvous is not None:
        link = tcp_rendezvous.join(process, rendezvous, hello)
        if link is not None:
            return agent.serve_driver(link)
    return agent.serve_driver(LocalAgentTransport(local_rendezvous.join(process, hello)))


def _masks() -> dict[str, str]:
    """Return the mask variables of all kinds that are set in this process."""
    names = {name for kind in OWN_KINDS for name in make_vendor(kind).mask((), os.environ)}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def find_difference(launcher: str, hellos: Sequence[Hello]) -> str | None:
    """Return a message about the first difference that keeps the processes from forming one session, or None.

    The first of `hellos` is rank 0's.
    """
    first = hellos[0]
    for other in hellos[1:]:
        for what, show in _COMPARED.items():
            remote = other.machine != first.machine
            if _compared(first, show, remote=remote) != _compared(other, show, remote=remote):
                return (
                    f"the processes that {launcher} has started differ in their {what}: rank 0 has {show(first)}, rank "
                    f"{other.rank} has {show(other)}; start all with the same, or use --accel-launcher off, with which "
                    "each has its own session"
                )
    return None


def _masked(hello: Hello) -> str:
    return " ".join(f"{name}={value}" for name, value in hello.masks.items()) or "no mask"


_COMPARED: Mapping[str, Callable[[Hello], str]] = {
    "arguments": lambda hello: " ".join(hello.args) or "none",
    "working directory": lambda hello: hello.directory,
    "root directory": lambda hello: hello.rootdir,
    "visible devices": _masked,
}
"""The facts that must be equal, by name, each with a function that returns its text."""


def _compared(hello: Hello, show: Callable[[Hello], str], *, remote: bool) -> object:
    """Return the value that must be equal: for masks on another machine only their lengths, since devices differ."""
    if remote and show is _masked:
        return {name: len(value.split(",")) for name, value in hello.masks.items()}
    return show(hello)


class LaunchedSession:
    """The other launched processes, as rank 0 sees them, with a client for the agent of each. Exists in rank 0 only."""

    def __init__(
        self,
        process: LauncherEnv,
        own: Hello,
        found: Sequence[tuple[Hello, Connection]],
        remote: Sequence[RemoteAgent],
        link: DriverLink | None,
    ) -> None:
        """`own` is the greeting of this process; `found` are the others on this machine, `remote` the rest.

        `link` is this end of the connections to other machines.
        """
        self.process = process
        self.hellos = [*(hello for hello, _ in found), *(one.hello for one in remote)]
        self.layout = tcp_rendezvous.layout_of(own, [hello.rank for hello, _ in found], remote)
        self.cluster = None
        """Always None: the launcher has placed the processes."""
        self.on_lost: Callable[[str], None] | None = None
        """Called, in a thread of an agent's client, with a message about the processes that have ended too early."""
        self._link = link
        self._ended = False
        self._loss = threading.Event()
        """Set once the loss of another process has been noticed."""
        transports: list[tuple[Hello, ClientTransport]] = [
            *((hello, LocalClientTransport(connection)) for hello, connection in found),
            *((one.hello, one) for one in remote),
        ]
        changes = EnvironmentChanges()
        self._clients = [
            AgentClient(hello, transport, self._name(hello.rank), self._agent_lost, changes)
            for hello, transport in sorted(transports, key=lambda pair: pair[0].rank)
        ]

    @property
    def spawns(self) -> dict[int, Spawn]:
        """The function that starts the fork server of each other launched process, by its rank."""
        return {client.hello.rank: client.spawn for client in self._clients}

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> MachinesStarter:
        """Return the starter of ranks in the launched processes."""
        return MachinesStarter(spec, here, self, reports)

    @property
    def remote_leases(self) -> dict[int, RemoteLeases]:
        """The devices of the other machines, by machine number; the first agent of each machine leases them."""
        clients = {client.hello.rank: client for client in self._clients}
        return {
            number: clients[min(machine.server_numbers)].leases
            for number, machine in enumerate(self.layout.machines)
            if number
        }

    def inventory(self, machine: int, kind: str, settings: Settings) -> Inventory | str:
        """Return the devices of `kind` on another machine, or why they cannot be looked up."""
        try:
            return self.remote_leases[machine].inventory(kind, settings)
        except RemoteDevicesError as error:
            return str(error)

    @property
    def loss(self) -> str | None:
        """A message about the processes and machines that were lost; None if there are none."""
        gone = [client for client in self._clients if client.lost]
        lost_machines = {
            client.hello.machine: client.machine_loss for client in gone if client.machine_loss is not None
        }
        named = [
            f"rank {client.hello.rank} (pid {client.hello.pid}{self._on_machine(client.hello.rank)})"
            for client in gone
            if client.hello.machine not in lost_machines
        ]
        for machine, why in lost_machines.items():
            ranks = [client.hello.rank for client in self._clients if client.hello.machine == machine]
            named.append(f"the machine {self._name(ranks[0])} with {ranks_text(ranks)}: {why}")
        return f"{self.process.launcher} has lost {', '.join(named)}" if named else None

    @property
    def about(self) -> str:
        """A short description of the launched processes."""
        machines = self.layout.machines
        where = ", ".join(f"{machine.name} ({ranks_text(machine.server_numbers)})" for machine in machines)
        return (
            self.process.about if len(machines) == 1 else f"{self.process.about} on {len(machines)} machines: {where}"
        )

    def _name(self, rank: int) -> str:
        return next(machine.name for machine in self.layout.machines if rank in machine.server_numbers)

    def _on_machine(self, rank: int) -> str:
        return "" if rank in self.layout.machines[0].server_numbers else f" on {self._name(rank)}"

    def handle_sigterm(self) -> None:
        """Install a handler for SIGTERM that ends the session with a message about the cause.

        If one of its processes ends, a launcher sends SIGTERM to the others.
        """
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._loss.wait(_LOSS_TIMEOUT)
        pytest.exit(self.loss or f"{self.process.launcher} has sent SIGTERM", returncode=pytest.ExitCode.INTERRUPTED)

    def end(self, status: int) -> None:
        """Have the other processes exit with `status`, after this one."""
        self._ended = True
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for client in self._clients:
            client.end(status)
        if self._link is not None:
            self._link.stop()

    def _agent_lost(self) -> None:
        if self._ended:
            return
        self._loss.set()
        if self.on_lost is not None and self.loss is not None:
            self.on_lost(self.loss)
