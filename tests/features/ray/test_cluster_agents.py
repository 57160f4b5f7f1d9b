"""Tests of the agents that join a session on a cluster, and of the port that admits them."""

from __future__ import annotations

import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_accel.features.launchers import machine_link
from pytest_accel.features.launchers.job_secret import WrongSecret
from pytest_accel.features.launchers.machine_link import AgentLink
from pytest_accel.features.ray.agent_greeting import Invitation, NodeHello
from pytest_accel.features.ray.suite_code import suite_code
from pytest_accel.messages.struct_messages import encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.settings.options import Settings
from tests.features.ray.table_cluster import Agents


def no_target(target: machine_link.Target) -> tuple[socket.socket, int | None]:
    raise FileNotFoundError


def greet(invitation: Invitation) -> tuple[AgentLink, Connection]:
    """Call as the agent of the invitation's machine; return its connection. Raise WrongSecret if it has another key."""
    link = machine_link.call("127.0.0.1", invitation.port, bytes.fromhex(invitation.key))
    connection = link.start(no_target)
    connection.send_bytes(encode(NodeHello(invitation.machine, "there", suite_code(""), (), link.name)))
    return link, connection


def test_only_expected_agents_with_the_key_are_admitted() -> None:
    agents = Agents(Settings())
    nodes = agents.nodes
    invitation = nodes.expect(1, "node-1", "127.0.0.1")
    with pytest.raises(WrongSecret):
        greet(replace(invitation, key="00" * 32))

    def is_refused(other: Invitation) -> bool:
        refused, connection = greet(other)
        with pytest.raises(EOFError):
            connection.recv_bytes()
        refused.close()
        return True

    assert all(is_refused(replace(invitation, machine=stranger)) for stranger in (2, 0))
    link, _ = greet(invitation)
    assert agents.joined.get(timeout=60) == 1
    assert is_refused(invitation)  # An invitation is valid once.
    link.close()
    assert agents.lost.get(timeout=60) == (1, "its agent has ended")
    nodes.close()


def test_an_agent_ends_with_its_starter() -> None:
    agents = Agents(Settings())
    first, second = agents.start(), agents.start()
    assert agents.nodes.layout.machines[second].address
    status = Path(f"/proc/{agents.processes[second].pid}/status")
    if status.exists():
        ignored = next(line for line in status.read_text().splitlines() if line.startswith("SigIgn"))
        assert not int(ignored.split()[1], 16) & 1 << signal.SIGCHLD - 1
    stdin = agents.processes[first].stdin
    assert stdin is not None
    stdin.close()
    assert agents.lost.get(timeout=60) == (first, "its agent has ended")
    assert agents.close() == {first: 1, second: 0}
    assert agents.lost.empty()
    # The number of a lost node stays in use.
    assert [node.name for node in agents.nodes.layout.machines[1:]] == ["node-1", "node-2"]
