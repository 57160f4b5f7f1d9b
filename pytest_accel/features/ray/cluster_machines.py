"""The machines of a session on a cluster: the controller's, and those whose agents join while the session runs.

The agents connect to a TCP port of the controller, which admits those that know the session's random key.
"""

from __future__ import annotations

import os
import platform
import secrets
from asyncio import Future, get_running_loop
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import partial

from pytest_accel.core import log, loop_tasks, threads
from pytest_accel.core.kinds import KINDS
from pytest_accel.core.launcher_env import of_a_rank
from pytest_accel.features.launchers import job_secret
from pytest_accel.features.launchers.agent_client import AgentClient, EnvironmentChanges
from pytest_accel.features.launchers.machine_link import DriverLink
from pytest_accel.features.launchers.placement import RankMachine
from pytest_accel.features.launchers.rendezvous import own_interfaces
from pytest_accel.features.ray.agent_greeting import Invitation, NodeHello
from pytest_accel.features.ray.suite_code import difference, suite_code
from pytest_accel.messages.struct_messages import decode
from pytest_accel.pool.starter import LostPlaceError
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
    """The machines of a session on a cluster. A lost machine keeps its number, and its entry in `machines`.

    Its methods are called in the thread of the pool's loop.
    """

    def __init__(self, settings: Settings, rootdir: str, on_lost: Callable[[int, str], None]) -> None:
        """Agents lease the devices of their machines by `settings`.

        `rootdir` is the suite's root directory: a machine whose files differ is not used.

        `on_lost` is called in the loop with the number of a machine that is lost or may not join, and the reason.
        """
        self.machines = [RankMachine(platform.node(), "")]
        """All machines so far."""
        self.clients: dict[int, AgentClient] = {}
        """The clients of the agents that have joined, by the number of the machine."""
        self._settings = settings
        self._rootdir = rootdir
        self._code = suite_code(rootdir)
        self._on_lost = on_lost
        self._joined: dict[int, Future[None]] = {}
        """Done once the agent of a machine has joined; a LostPlaceError if it may not join any more."""
        self._is_closing = False
        self._changes = EnvironmentChanges()
        self._key = secrets.token_bytes(32)
        self._loop = get_running_loop()
        self._link = DriverLink(self._key, 0, self._greeted)

    def expect(self, name: str, address: str) -> Invitation:
        """Add a machine, whose agent is about to be started; return what the agent needs to join.

        The numbers of machines are 1, 2, ... in the order of the calls. `name` is for messages to the user. The other
        machines reach it at `address`.
        """
        number = len(self.machines)
        self.machines.append(RankMachine(name, address))
        # Loopback is last: it reaches the controller only from the same machine, which may have no other address.
        addresses = (*(address for _, address in own_interfaces()), _LOOPBACK)
        variable = os.environ.get(log.VARIABLE)
        return Invitation(number, addresses, self._link.port, self._key.hex(), self._rootdir, variable)

    def joined(self, number: int) -> Future[None]:
        """Return a future that is done once the agent of a machine has joined, and fails if it cannot join."""
        return self._joined.setdefault(number, self._loop.create_future())

    def lose(self, number: int, why: str) -> None:
        """Do not admit the agent of a machine any more; no-op if it has joined."""
        loop_tasks.fail(self.joined(number), LostPlaceError(why))

    def close(self) -> None:
        """Have all agents exit, and end the connections to them."""
        self._is_closing = True
        for client in self.clients.values():
            client.end(0)
        self._link.close()

    def _join(self, agent: str, hello: NodeHello, why: str | None) -> None:
        """Admit an agent that has connected, unless `why` says that its machine cannot be used."""
        number = hello.machine
        # An invitation is valid once.
        if why is not None or number not in range(1, len(self.machines)) or self.joined(number).done():
            if why is not None:
                self._on_lost(number, why)
            return
        self.clients[number] = AgentClient(
            self._link,
            agent,
            self.machines[number].name,
            partial(self._post, self._agent_lost, number),
            lambda: {**additions(os.environ, hello.variables), **self._changes()},
            self._settings,
        )
        self.joined(number).set_result(None)

    def _agent_lost(self, number: int) -> None:
        if not self._is_closing:
            self._on_lost(number, self.clients[number].machine_loss or "")

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # The pool is closed.
            self._loop.call_soon_threadsafe(call, *arguments)

    # In other threads

    def _greeted(self, agent: str, greeting: bytes) -> None:
        with suppress(ValueError):
            threads.start(self._compare, "accel-greeting", agent, decode(greeting, NodeHello))

    def _compare(self, agent: str, hello: NodeHello) -> None:
        """Compare the code of an agent that has called, which may take some time."""
        self._post(self._join, agent, hello, self._difference(hello))

    def _difference(self, hello: NodeHello) -> str | None:
        """Return how the code on the machine of an agent differs from the controller's; None if it does not."""
        if difference(self._code, hello.code) is not None:
            self._code = suite_code(self._rootdir)  # Tests may have created files since it was computed.
        found = difference(self._code, hello.code)
        return None if found is None else f"the machine {hello.host} cannot run the tests in {self._rootdir}: {found}"
