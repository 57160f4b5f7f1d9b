"""The nodes of a session on a cluster: the controller's, and those whose agents join while the session runs."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pytest_accel.features.launchers.agent_admission import AgentAdmission, Invitation
from pytest_accel.features.launchers.agent_client import AgentClient, EnvironmentChanges
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.greeting import RemotePeer
from pytest_accel.features.launchers.node_environment import additions
from pytest_accel.features.launchers.remote_leases import RemoteLeases
from pytest_accel.features.launchers.suite_code import difference, suite_code
from pytest_accel.features.launchers.tcp_transport import TcpClientTransport
from pytest_accel.forkserver.server_client import Spawn, spawn_here
from pytest_accel.pool.placement import Cluster, ForkServer, Layout, Node
from pytest_accel.settings.options import Settings

OnJoin = Callable[[], None]
OnFailure = Callable[[str], None]


@dataclass(slots=True, eq=False)
class _ClusterNode:
    """A node of the cluster: expected, then joined, then lost; or lost without having joined."""

    client: AgentClient | None = None
    """The client of its agent, once that has joined."""
    transport: TcpClientTransport | None = None
    """The client's transport."""
    loss: str | None = None
    """Why the node is lost; None if it is not."""
    waiting: list[tuple[OnJoin, OnFailure]] = field(default_factory=list)
    """The callbacks to call once the agent has joined, or will not join any more."""

    def join(self, client: AgentClient, transport: TcpClientTransport) -> list[Callable[[], None]]:
        """Record that the agent has joined; return the callbacks that are due."""
        waiting, self.waiting = self.waiting, []
        self.client, self.transport = client, transport
        return [on_join for on_join, _ in waiting]

    def lose(self, why: str) -> list[Callable[[], None]]:
        """Record that the node is lost; return the callbacks that are due."""
        waiting, self.waiting = self.waiting, []
        self.loss = self.loss or why
        return [partial(on_failure, self.loss) for _, on_failure in waiting]


class ClusterNodes:
    """The nodes of a session on a cluster. A lost node keeps its number, and its entry in `layout`.

    Thread-safe. Callbacks are called without a lock held.
    """

    def __init__(self, settings: Settings, rootdir: str) -> None:
        """`settings` are those by which agents lease the devices of their nodes.

        `rootdir` is the suite's root directory: a node whose files differ is not used.
        """
        self.cluster: Cluster | None = None
        """The cluster, set before the pool is made."""
        self.on_lost: Callable[[int, str], None] = _ignore
        """Called with the number of a node that has joined and is lost, and the reason."""
        self.layout = Layout((Node(platform.node(), "", (ForkServer(0, None),)),))
        """All nodes so far."""
        self._settings = settings
        self._rootdir = rootdir
        self._code = suite_code(rootdir)
        self._lock = threading.RLock()
        self._nodes: dict[int, _ClusterNode] = {}
        self._changes = EnvironmentChanges()
        self._closing = False
        self._failure: str | None = None
        """The error after which no agent can join any more; None if there was none."""
        self._admission = AgentAdmission(rootdir, self._join, self._admission_failed)

    @property
    def spawns(self) -> dict[int, Spawn]:
        """The functions that start the fork servers of the nodes that have joined, by number."""
        with self._lock:
            joined = {number: node.client for number, node in self._nodes.items() if node.client is not None}
        return {0: spawn_here, **{number: client.spawn for number, client in joined.items()}}

    @property
    def remote_leases(self) -> dict[int, RemoteLeases]:
        """The leases on devices of the nodes that have joined, by number."""
        with self._lock:
            return {number: node.client.leases for number, node in self._nodes.items() if node.client is not None}

    def expect(self, number: int, name: str, address: str) -> Invitation:
        """Add a node, whose agent is about to be started; return what the agent needs to join.

        The numbers of nodes are 1, 2, ... in the order of the calls. `name` is for messages to the user. `address` is
        the one at which the other nodes reach the node.
        """
        with self._lock:
            if number != len(self.layout.nodes):
                raise ValueError(f"node {number}: the next node is number {len(self.layout.nodes)}")
            self._nodes[number] = _ClusterNode(loss=self._failure)
            self.layout = Layout((*self.layout.nodes, Node(name, address, (ForkServer(number, None),))))
            return self._admission.expect(number)

    def when_joined(self, number: int, on_join: OnJoin, on_failure: OnFailure) -> None:
        """Call `on_join` once the agent of a node has joined, or `on_failure` with the reason if it is lost.

        The call may happen before this method returns, and in any thread.
        """
        with self._lock:
            node = self._nodes[number]
            if node.client is None and node.loss is None:
                node.waiting.append((on_join, on_failure))
                return
            loss = node.loss
        if loss is None:
            on_join()
        else:
            on_failure(loss)

    def give_up(self, number: int, why: str) -> None:
        """Record that the agent of a node cannot be started or has ended before it joined; no-op if it has joined."""
        self._admission.forget(number)
        with self._lock:
            node = self._nodes[number]
            callbacks = node.lose(why) if node.client is None else []
        for callback in callbacks:
            callback()

    def close(self) -> None:
        """Have all agents exit, and end the connections to them. The pool must have been closed."""
        self._admission.close()
        with self._lock:
            self._closing = True
            nodes = list(self._nodes.values())
        for node in nodes:
            if node.client is not None and node.transport is not None:
                node.client.end(0)
                node.transport.close()

    # In the threads of the admission and of the agents' clients

    def _join(self, peer: RemotePeer) -> None:
        """Make the client of an agent that has connected; give its node up if it has other code."""
        number = peer.hello.rank
        if (why := self._difference(peer.hello)) is not None:
            peer.link.socket.close()
            self.give_up(number, why)
            return
        with self._lock:
            node = self._nodes[number]
            transport = TcpClientTransport(peer.link)
            client = AgentClient(
                peer.hello,
                transport,
                self.layout.nodes[number].name,
                partial(self._agent_lost, number),
                lambda: {**additions(os.environ, peer.hello.variables), **self._changes()},
                stands_for_node=True,
            )
            client.leases.use(self._settings)
            callbacks = node.join(client, transport)
        for callback in callbacks:
            callback()

    def _difference(self, hello: Hello) -> str | None:
        """Return how the code on the node of an agent differs from that of the controller; None if it does not."""
        if hello.code is None:
            return f"the agent on {hello.host} has not told its code"
        if difference(self._code, hello.code) is not None:
            self._code = suite_code(self._rootdir)  # Tests may have created files since it was computed.
        found = difference(self._code, hello.code)
        return None if found is None else f"the node {hello.host} cannot run the tests in {self._rootdir}: {found}"

    def _agent_lost(self, number: int) -> None:
        with self._lock:
            if self._closing:
                return
            node = self._nodes[number]
            assert node.client is not None
            why = node.client.node_loss
            assert why is not None
            node.lose(why)
        self.on_lost(number, why)

    def _admission_failed(self, why: str) -> None:
        with self._lock:
            self._failure = why
            expected = [node for node in self._nodes.values() if node.client is None]
            callbacks = [callback for node in expected for callback in node.lose(why)]
        for callback in callbacks:
            callback()


def _ignore(number: int, why: str) -> None:
    pass
