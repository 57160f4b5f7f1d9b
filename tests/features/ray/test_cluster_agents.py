"""Tests of the agents that join a session on a cluster, and of the port that admits them."""

from __future__ import annotations

import errno
import queue
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.features.launchers import greeting
from pytest_accel.features.launchers.agent_messages import JOB, Hello, Invitation, read_invitation
from pytest_accel.features.launchers.authentication import SealedFrames
from pytest_accel.features.launchers.greeting import AuthenticatedLink, RemotePeer
from pytest_accel.features.launchers.handshakes import Refused, perform
from pytest_accel.features.ray import cluster_machines
from pytest_accel.features.ray.cluster_machines import AgentAdmission, ClusterMachines
from pytest_accel.settings.options import Settings
from tests.deadline import eventually
from tests.features.ray.table_cluster import Agents, start_agent


@pytest.fixture
def joined() -> queue.SimpleQueue[RemotePeer]:
    """Provide the queue of the agents that the port has admitted."""
    return queue.SimpleQueue()


@pytest.fixture
def admission(joined: queue.SimpleQueue[RemotePeer]) -> Iterator[AgentAdmission]:
    """Yield a port for agents. An error in its thread fails the test."""
    failures: list[str] = []
    made = AgentAdmission("", joined.put, failures.append)
    yield made
    made.close()
    while not joined.empty():
        joined.get().link.socket.close()
    assert failures == []


def greet(invitation: Invitation) -> None:
    """Join as the agent of the invitation's node, and close the connection; raise EOFError or OSError if refused."""
    hello = Hello(invitation.machine, 1, (), "/", "", {}, "there", "")
    with socket.create_connection(("127.0.0.1", invitation.port)) as link:
        secret = bytes.fromhex(invitation.secret)
        clock, _ = perform(link, greeting.greet_listener(secret, JOB, hello), monotonic() + 60)
        assert abs(clock) < 60


def test_an_invitation_is_read_from_its_line() -> None:
    invitation = Invitation(3, ("10.0.0.1", "::1"), 4711, "00ff", "/suite")
    assert read_invitation(invitation.line()) == invitation
    for invalid in (b"", b"{}", b'{"machine": "3", "addresses": [], "port": 1, "secret": ""}'):
        with pytest.raises(ValueError, match="got an invalid invitation: "):
            read_invitation(invalid)


def test_only_expected_agents_with_the_secret_are_admitted(
    admission: AgentAdmission, joined: queue.SimpleQueue[RemotePeer]
) -> None:
    invitation = admission.expect(1)
    with pytest.raises(Refused):
        greet(replace(invitation, secret="00" * 32))
    for stranger in (2, 0):
        with pytest.raises((EOFError, OSError)):
            greet(replace(invitation, machine=stranger))
    assert joined.empty()

    hello = Hello(1, 1, (), "/", "", {}, "there", "")
    with socket.create_connection(("127.0.0.1", invitation.port)) as link:
        perform(link, greeting.greet_listener(bytes.fromhex(invitation.secret), JOB, hello), monotonic() + 60)
        peer = joined.get(timeout=60)
    assert (peer.hello, peer.address) == (hello, "127.0.0.1")
    peer.link.socket.close()
    with pytest.raises((EOFError, OSError)):
        greet(invitation)  # An invitation is valid once.
    assert joined.empty()


def test_an_agent_that_has_disconnected_may_connect_again(
    admission: AgentAdmission, joined: queue.SimpleQueue[RemotePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote_peer = greeting.remote_peer
    calls: list[socket.socket] = []

    def of_second(call: socket.socket, hello: Hello, frames: SealedFrames) -> RemotePeer:
        calls.append(call)
        if len(calls) == 1:
            raise OSError(errno.ENOTCONN, "not connected")
        return remote_peer(call, hello, frames)

    monkeypatch.setattr(greeting, "remote_peer", of_second)
    invitation = admission.expect(1)
    greet(invitation)
    eventually("the first connection to be handled", lambda: calls)
    greet(invitation)
    peer = joined.get(timeout=60)
    assert peer.hello.rank == 1
    peer.link.socket.close()
    assert calls[0].fileno() == -1


def test_an_agent_ends_with_its_starter() -> None:
    agents = Agents(Settings())
    lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    agents.nodes.on_lost = lambda number, why: lost.put((number, why))
    first, second = agents.start(), agents.start()
    assert agents.nodes.layout.machines[second].address
    status = Path(f"/proc/{agents.processes[second].pid}/status")
    if status.exists():
        ignored = next(line for line in status.read_text().splitlines() if line.startswith("SigIgn"))
        assert not int(ignored.split()[1], 16) & 1 << signal.SIGCHLD - 1
    stdin = agents.processes[first].stdin
    assert stdin is not None
    stdin.close()
    assert lost.get(timeout=60) == (first, "its agent has ended")
    assert agents.close() == {first: 1, second: 0}
    assert lost.empty()
    # The number of a lost node stays in use.
    assert [node.name for node in agents.nodes.layout.machines[1:]] == ["node-1", "node-2"]


def test_waiting_for_agents_fails_after_an_error_in_the_port_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(link: AuthenticatedLink) -> None:
        link.socket.close()
        raise IndexError("met in the thread")

    monkeypatch.setattr(cluster_machines, "TcpClientTransport", fail)
    nodes = ClusterMachines(Settings(), "")
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    invitation = nodes.expect(1, "far", "127.0.0.1")
    nodes.when_joined(1, lambda: answers.put("joined"), answers.put)
    agent = start_agent(invitation.line())
    assert "IndexError: met in the thread" in answers.get(timeout=60)
    nodes.expect(2, "farther", "127.0.0.1")
    nodes.when_joined(2, lambda: answers.put("joined"), answers.put)
    assert "IndexError: met in the thread" in answers.get(timeout=60)
    nodes.close()
    assert agent.wait(60) == 1
    assert agent.stdin is not None
    agent.stdin.close()


def test_waiting_for_an_agent_ends_with_the_reason_when_it_is_given_up() -> None:
    nodes = ClusterMachines(Settings(), "")
    answers: list[str] = []
    with pytest.raises(ValueError, match="machine 2: the next machine is number 1"):
        nodes.expect(2, "far", "127.0.0.1")
    invitation = nodes.expect(1, "far", "127.0.0.1")
    nodes.when_joined(1, lambda: answers.append("joined"), answers.append)
    assert answers == []
    nodes.give_up(1, "its host is down")
    nodes.when_joined(1, lambda: answers.append("joined"), answers.append)
    assert answers == ["its host is down"] * 2
    with pytest.raises((EOFError, OSError)):
        greet(invitation)
    assert set(nodes.spawns) == {0}
    nodes.close()
