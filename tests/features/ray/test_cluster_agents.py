"""Tests of the agents that join a session on a cluster, and of the port that admits them."""

from __future__ import annotations

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
from pytest_accel.features.launchers.greeting import RemotePeer
from pytest_accel.features.launchers.handshakes import Refused, perform
from pytest_accel.features.ray.cluster_machines import AgentAdmission
from pytest_accel.settings.options import Settings
from tests.features.ray.table_cluster import Agents


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
