"""The machines of a session on a cluster: the controller's, and those whose agents join while the session runs.

The agents connect to a TCP port of the controller, which admits those that know the session's random key.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import partial

from pytest_accel.core import log, threads
from pytest_accel.core.kinds import KINDS
from pytest_accel.core.launcher_env import of_a_rank
from pytest_accel.features.launchers import job_secret
from pytest_accel.features.launchers.agent_client import AgentClient, EnvironmentChanges
from pytest_accel.features.launchers.agent_messages import Hello, Invitation
from pytest_accel.features.launchers.cluster import Cluster
from pytest_accel.features.launchers.driver_link import DriverLink, RemoteAgent
from pytest_accel.features.launchers.placement import ForkServer, Layout, RankMachine
from pytest_accel.features.launchers.remote_leases import RemoteLeases
from pytest_accel.features.launchers.suite_code import difference, suite_code
from pytest_accel.features.launchers.tcp_rendezvous import own_interfaces
from pytest_accel.forkserver.server_process import Spawn
from pytest_accel.settings.options import Settings

_LOOPBACK = "127.0.0.1"


_OF_ONE_MACHINE = {"_", "DISPLAY", "HOSTNAME", "OLDPWD", "PWD", "SHLVL", "TEMP", "TMP", "TMPDIR", "VIRTUAL_ENV"}
_PREFIXES_OF_ONE_MACHINE = ("DBUS_", "KUBERNETES_", "RAY_", "SLURM_", "SSH_", "XDG_")
"""Names and prefixes of variables that describe a machine, or a process there."""


def additions(environ: Mapping[str, str], present: Container[str]) -> dict[str, str]:
    """Return the variables of the controller's `environ` for the ranks on a machine that sets those in `present`.

    If both set a variable, the machine's value is used, except for pytest's variables (``PYTEST_*``). Masks are left
    out, because they name the devices of one machine.
    """
    masks = {name for kind in KINDS.values() for name in kind.masks}
    left_out = {*_OF_ONE_MACHINE, *masks, *of_a_rank(environ), "PYTEST_CURRENT_TEST", job_secret.VARIABLE}
    return {
        name: value
        for name, value in environ.items()
        if (name not in present or name.startswith("PYTEST_"))
        and name not in left_out
        and not name.startswith(_PREFIXES_OF_ONE_MACHINE)
    }


OnJoin = Callable[[], None]
OnFailure = Callable[[str], None]


@dataclass(slots=True, eq=False)
class _ClusterMachine:
    """A machine of the cluster: expected, then joined, then lost; or lost without having joined."""

    client: AgentClient | None = None
    """The client of its agent, once that has joined."""
    loss: str | None = None
    """Why the machine is lost; None if it is not."""
    waiting: list[tuple[OnJoin, OnFailure]] = field(default_factory=list)
    """The callbacks to call once the agent has joined, or will not join any more."""

    def join(self, client: AgentClient) -> list[Callable[[], None]]:
        """Record that the agent has joined; return the callbacks that are due."""
        waiting, self.waiting = self.waiting, []
        self.client = client
        return [on_join for on_join, _ in waiting]

    def lose(self, why: str) -> list[Callable[[], None]]:
        """Record that the machine is lost; return the callbacks that are due."""
        waiting, self.waiting = self.waiting, []
        self.loss = self.loss or why
        return [partial(on_failure, self.loss) for _, on_failure in waiting]


class ClusterMachines:
    """The machines of a session on a cluster. A lost machine keeps its number, and its entry in `layout`.

    Thread-safe. Callbacks are called without a lock held.
    """

    def __init__(self, settings: Settings, rootdir: str) -> None:
        """`settings` are those by which agents lease the devices of their machines.

        `rootdir` is the suite's root directory: a machine whose files differ is not used.
        """
        self.cluster: Cluster | None = None
        """The cluster, set before the pool is made."""
        self.on_lost: Callable[[int, str], None] = _ignore
        """Called with the number of a machine that has joined and is lost, and the reason."""
        self.layout = Layout((RankMachine(platform.node(), "", (ForkServer(0, None),)),))
        """All machines so far."""
        self._settings = settings
        self._rootdir = rootdir
        self._code = suite_code(rootdir)
        self._lock = threading.RLock()
        self._machines: dict[int, _ClusterMachine] = {}
        self._changes = EnvironmentChanges()
        self._closing = False
        self._key = secrets.token_bytes(32)
        self._link = DriverLink(self._key, 0, _ignore_caller)
        self._thread = threads.start(self._admit, "accel-admission")

    @property
    def spawns(self) -> dict[int, Spawn]:
        """The functions that start the fork servers of the machines that have joined, by number."""
        with self._lock:
            joined = {
                number: machine.client for number, machine in self._machines.items() if machine.client is not None
            }
        return {number: client.spawn for number, client in joined.items()}

    @property
    def remote_leases(self) -> dict[int, RemoteLeases]:
        """The leases on devices of the machines that have joined, by number."""
        with self._lock:
            return {
                number: machine.client.leases
                for number, machine in self._machines.items()
                if machine.client is not None
            }

    def expect(self, number: int, name: str, address: str) -> Invitation:
        """Add a machine, whose agent is about to be started; return what the agent needs to join.

        The numbers of machines are 1, 2, ... in the order of the calls. `name` is for messages to the user. The other
        machines reach it at `address`.
        """
        with self._lock:
            if number != len(self.layout.machines):
                raise ValueError(f"machine {number}: the next machine is number {len(self.layout.machines)}")
            self._machines[number] = _ClusterMachine()
            self.layout = Layout((*self.layout.machines, RankMachine(name, address, (ForkServer(number, None),))))
        # Loopback is last: it reaches the controller only from the same machine, which may have no other address.
        addresses = (*(address for _, address in own_interfaces()), _LOOPBACK)
        variable = os.environ.get(log.VARIABLE)
        return Invitation(number, addresses, self._link.port, self._key.hex(), self._rootdir, variable)

    def when_joined(self, number: int, on_join: OnJoin, on_failure: OnFailure) -> None:
        """Call `on_join` once the agent of a machine has joined, or `on_failure` with the reason if it is lost.

        The call may happen before this method returns, and in any thread.
        """
        with self._lock:
            machine = self._machines[number]
            if machine.client is None and machine.loss is None:
                machine.waiting.append((on_join, on_failure))
                return
            loss = machine.loss
        if loss is None:
            on_join()
        else:
            on_failure(loss)

    def give_up(self, number: int, why: str) -> None:
        """Record that the agent of a machine cannot be started or ended before it joined; no-op if it has joined."""
        with self._lock:
            machine = self._machines[number]
            callbacks = machine.lose(why) if machine.client is None else []
        for callback in callbacks:
            callback()

    def close(self) -> None:
        """Have all agents exit, and end the connections to them. The pool must have been closed."""
        with self._lock:
            self._closing = True
            clients = [machine.client for machine in self._machines.values() if machine.client is not None]
        for client in clients:
            client.end(0)
        self._link.close()
        threads.end(self._thread)

    # In the threads of the admission and of the link

    def _admit(self) -> None:
        """Admit the agents of expected machines, each once, until the link is closed."""
        while (agent := self._link.joined.get()) is not None:
            with self._lock:
                machine = self._machines.get(agent.hello.rank)
                expected = machine is not None and machine.client is None and machine.loss is None
            why = self._difference(agent.hello) if expected else None
            agent.meet(remote=expected and why is None)
            if why is not None:
                self.give_up(agent.hello.rank, why)
            elif expected:
                self._join(agent)

    def _join(self, agent: RemoteAgent) -> None:
        """Make the client of an agent that has connected."""
        number = agent.hello.rank
        with self._lock:
            client = AgentClient(
                agent.hello,
                agent,
                self.layout.machines[number].name,
                partial(self._agent_lost, number),
                lambda: {**additions(os.environ, agent.hello.variables), **self._changes()},
                stands_for_machine=True,
            )
            client.leases.use(self._settings)
            callbacks = self._machines[number].join(client)
        for callback in callbacks:
            callback()

    def _difference(self, hello: Hello) -> str | None:
        """Return how the code on the machine of an agent differs from that of the controller; None if it does not."""
        if hello.code is None:
            return f"the agent on {hello.host} has not told its code"
        if difference(self._code, hello.code) is not None:
            self._code = suite_code(self._rootdir)  # Tests may have created files since it was computed.
        found = difference(self._code, hello.code)
        return None if found is None else f"the machine {hello.host} cannot run the tests in {self._rootdir}: {found}"

    def _agent_lost(self, number: int) -> None:
        with self._lock:
            if self._closing:
                return
            machine = self._machines[number]
            assert machine.client is not None
            why = machine.client.machine_loss
            assert why is not None
            machine.lose(why)
        self.on_lost(number, why)


def _ignore(number: int, why: str) -> None:
    pass


def _ignore_caller() -> None:
    """Ignore a caller with another key: any process may connect."""
