"""The machines of a session on a cluster: the controller's, and those whose agents join while the session runs.

The agents connect to a TCP port of the controller, which admits those that know the session's random key.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
from collections.abc import Callable, Container, Mapping
from functools import partial
from queue import SimpleQueue
from socket import socket

from pytest_accel.core import log, threads
from pytest_accel.core.kinds import KINDS
from pytest_accel.core.launcher_env import of_a_rank
from pytest_accel.features.launchers import job_secret
from pytest_accel.features.launchers.agent_client import AgentClient, EnvironmentChanges
from pytest_accel.features.launchers.machine_link import DriverLink
from pytest_accel.features.launchers.placement import ForkServer, Layout, RankMachine
from pytest_accel.features.launchers.rendezvous import own_interfaces, read_greeting
from pytest_accel.features.ray.agent_greeting import Invitation, NodeHello
from pytest_accel.features.ray.suite_code import difference, suite_code
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.unix_sockets import Connection
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


class ClusterMachines:
    """The machines of a session on a cluster. A lost machine keeps its number, and its entry in `layout`.

    One thread expects machines, and another one admits them.
    """

    def __init__(
        self, settings: Settings, rootdir: str, on_joined: Callable[[int], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """`settings` are those by which agents lease the devices of their machines.

        `rootdir` is the suite's root directory: a machine whose files differ is not used.

        `on_joined` is called with the number of a machine whose agent has joined, and `on_lost` with that of a machine
        that is lost or may not join, and the reason, both in any thread.
        """
        self.layout = Layout((RankMachine(platform.node(), "", (ForkServer(0, None),)),))
        """All machines so far."""
        self.clients: dict[int, AgentClient] = {}
        """The clients of the agents that have joined, by the number of the machine."""
        self._settings = settings
        self._rootdir = rootdir
        self._code = suite_code(rootdir)
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._expected: set[int] = set()
        """The numbers of the machines that may join."""
        self._changes = EnvironmentChanges()
        self._joining = threading.Lock()
        """Held while a client is made, whose thread may find at once that its agent is lost."""
        self._closing = False
        self._key = secrets.token_bytes(32)
        self._calls: SimpleQueue[socket | None] = SimpleQueue()
        """The connections to agents that have called; at the end None."""
        self._link = DriverLink(self._key, 0, self._answer, _ignore_caller)
        self._thread = threads.start(self._admit, "accel-admission")

    def expect(self, number: int, name: str, address: str) -> Invitation:
        """Add a machine, whose agent is about to be started; return what the agent needs to join.

        The numbers of machines are 1, 2, ... in the order of the calls. `name` is for messages to the user. The other
        machines reach it at `address`.
        """
        if number != len(self.layout.machines):
            raise ValueError(f"machine {number}: the next machine is number {len(self.layout.machines)}")
        self.layout = Layout((*self.layout.machines, RankMachine(name, address, (ForkServer(number, None),))))
        self._expected.add(number)
        # Loopback is last: it reaches the controller only from the same machine, which may have no other address.
        addresses = (*(address for _, address in own_interfaces()), _LOOPBACK)
        variable = os.environ.get(log.VARIABLE)
        return Invitation(number, addresses, self._link.port, self._key.hex(), self._rootdir, variable)

    def forget(self, number: int) -> None:
        """Do not admit the agent of a machine any more; no-op if it has joined."""
        self._expected.discard(number)

    def close(self) -> None:
        """Have all agents exit, and end the connections to them. The pool must have been closed."""
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
            number = hello.machine
            expected = number in self._expected
            self._expected.discard(number)  # An invitation is valid once.
            why = self._difference(hello) if expected else None
            if expected and why is None:
                self._join(Connection(call.detach()), hello)
                continue
            call.close()
            if why is not None:
                self._on_lost(number, why)

    def _join(self, connection: Connection, hello: NodeHello) -> None:
        """Make the client of an agent that has connected."""
        with self._joining:
            client = AgentClient(
                connection,
                self.layout.machines[hello.machine].name,
                partial(self._agent_lost, hello.machine),
                lambda: {**additions(os.environ, hello.variables), **self._changes()},
                (self._link, hello.link),
                self._settings,
            )
            self.clients = {**self.clients, hello.machine: client}  # Others read it meanwhile.
        self._on_joined(hello.machine)

    def _difference(self, hello: NodeHello) -> str | None:
        """Return how the code on the machine of an agent differs from that of the controller; None if it does not."""
        if difference(self._code, hello.code) is not None:
            self._code = suite_code(self._rootdir)  # Tests may have created files since it was computed.
        found = difference(self._code, hello.code)
        return None if found is None else f"the machine {hello.host} cannot run the tests in {self._rootdir}: {found}"

    def _agent_lost(self, number: int) -> None:
        if not self._closing:
            with self._joining:
                why = self.clients[number].machine_loss
            assert why is not None
            self._on_lost(number, why)


def _ignore_caller() -> None:
    """Ignore a caller with another key: any process may connect."""
