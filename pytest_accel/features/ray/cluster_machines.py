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
from queue import SimpleQueue
from socket import socket

from pytest_accel.core import log, threads
from pytest_accel.core.kinds import KINDS
from pytest_accel.core.launcher_env import of_a_rank
from pytest_accel.features.launchers import job_secret
from pytest_accel.features.launchers.agent_client import AgentClient, EnvironmentChanges
from pytest_accel.features.launchers.machine_link import DriverLink
from pytest_accel.features.launchers.rendezvous import own_interfaces, read_greeting
from pytest_accel.features.ray.agent_greeting import Invitation, NodeHello
from pytest_accel.features.ray.suite_code import difference, suite_code
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.pool.placement import ForkServer, Layout, RankMachine
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
        self._calls: SimpleQueue[socket | None] = SimpleQueue()
        """The connections to agents that have called; at the end None."""
        self._link = DriverLink(self._key, 0, self._answer, _ignore_caller)
        self._thread = threads.start(self._admit, "accel-admission")

    @property
    def clients(self) -> dict[int, AgentClient]:
        """The clients of the agents that have joined, by the number of the machine."""
        with self._lock:
            return {number: one.client for number, one in self._machines.items() if one.client is not None}

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
        for client in self.clients.values():
            client.end(0)
        self._link.close()
        self._calls.put(None)
        threads.end(self._thread)

    # In the threads of the link, of the admission and of the clients

    def _answer(self) -> socket:
        ours, theirs = unix_sockets.pair()
        self._calls.put(ours)
        return theirs

    def _admit(self) -> None:
        """Admit the agents of expected machines, each once, until the link is closed."""
        while (call := self._calls.get()) is not None:
            hello = read_greeting(call, NodeHello)
            if hello is None:
                continue
            with self._lock:
                machine = self._machines.get(hello.machine)
                expected = machine is not None and machine.client is None and machine.loss is None
            why = self._difference(hello) if expected else None
            if expected and why is None:
                self._join(Connection(call.detach()), hello)
                continue
            call.close()
            if why is not None:
                self.give_up(hello.machine, why)

    def _join(self, connection: Connection, hello: NodeHello) -> None:
        """Make the client of an agent that has connected."""
        with self._lock:
            client = AgentClient(
                connection,
                self.layout.machines[hello.machine].name,
                partial(self._agent_lost, hello.machine),
                lambda: {**additions(os.environ, hello.variables), **self._changes()},
                (self._link, hello.link),
                self._settings,
            )
            callbacks = self._machines[hello.machine].join(client)
        for callback in callbacks:
            callback()

    def _difference(self, hello: NodeHello) -> str | None:
        """Return how the code on the machine of an agent differs from that of the controller; None if it does not."""
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
