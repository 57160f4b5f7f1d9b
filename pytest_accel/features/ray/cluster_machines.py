"""The machines of a session on a cluster: the controller's, and those whose agents join while the session runs.

The agents connect to a TCP port of the controller, which admits those that know the session's random key.
"""

from __future__ import annotations

import platform
import secrets
from asyncio import Future, get_running_loop
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from pytest_accel.core import loop_tasks
from pytest_accel.features.launchers.agent_client import AgentClient, EnvironmentChanges
from pytest_accel.features.launchers.machine_link import DriverLink
from pytest_accel.features.launchers.machines_starter import RankMachine
from pytest_accel.features.launchers.rendezvous import own_interfaces
from pytest_accel.features.ray.ray_messages import Invitation, NodeHello
from pytest_accel.messages.struct_messages import decode
from pytest_accel.pool.starter import LostPlaceError
from pytest_accel.settings.options import Settings

_LOOPBACK = "127.0.0.1"


class ClusterMachines:
    """The machines of a session on a cluster. A lost machine keeps its number, and its entry in `machines`.

    Its methods are called in the thread of the pool's loop.
    """

    def __init__(self, settings: Settings, changes: EnvironmentChanges, on_lost: Callable[[int], None]) -> None:
        """Agents lease the devices of their machines by `settings`. `changes` are those since the helper was started.

        `on_lost` is called in the loop with the number of a machine that is lost.
        """
        self.machines = [RankMachine(platform.node(), "")]
        """All machines so far."""
        self.clients: dict[int, AgentClient] = {}
        """The clients of the agents that have joined, by the number of the machine."""
        self._settings = settings
        self._on_lost = on_lost
        self._joined: dict[int, Future[None]] = {}
        """Done once the agent of a machine has joined; a LostPlaceError if it may not join any more."""
        self._is_closing = False
        self._changes = changes
        self._loop = get_running_loop()
        key = secrets.token_bytes(32)
        self._link = DriverLink(key, 0, self._greeted)
        # Loopback is last: it reaches the controller only from the same machine, which may have no other address.
        addresses = (*(address for _, address in own_interfaces()), _LOOPBACK)
        self.invitation = Invitation(addresses, self._link.port, key.hex())

    def add(self, name: str, address: str) -> None:
        """Add a machine, whose agent is being started. Its `name` is for the user; others reach it at `address`."""
        self.machines.append(RankMachine(name, address))

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

    def _join(self, agent: str, hello: NodeHello) -> None:
        """Admit an agent that has connected."""
        number = hello.machine
        # An invitation is valid once.
        if number not in range(1, len(self.machines)) or self.joined(number).done():
            return
        self.clients[number] = AgentClient(
            self._link,
            agent,
            self.machines[number].name,
            partial(self._post, self._lost, number),
            self._changes,
            self._settings,
        )
        self.joined(number).set_result(None)

    def _lost(self, number: int) -> None:
        if not self._is_closing:  # Else the helper would kill an agent that cleans up.
            self._on_lost(number)

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # The pool is closed.
            self._loop.call_soon_threadsafe(call, *arguments)

    # In the thread of the link

    def _greeted(self, agent: str, greeting: bytes) -> None:
        with suppress(ValueError):
            self._post(self._join, agent, decode(greeting, NodeHello))
