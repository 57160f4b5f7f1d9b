"""Tests of the agents that join a session on a cluster, and of the port that admits them."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_accel.features.launchers import machine_link
from pytest_accel.features.launchers.agent_client import EnvironmentChanges
from pytest_accel.features.launchers.job_secret import WrongSecret
from pytest_accel.features.launchers.machine_link import AgentLink
from pytest_accel.features.ray.cluster_machines import ClusterMachines
from pytest_accel.features.ray.ray_messages import Invitation, NodeHello
from pytest_accel.messages.struct_messages import encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.settings.options import Settings
from tests.features.ray.table_cluster import start_agent


def no_target(target: machine_link.Target) -> tuple[socket.socket, int | None]:
    raise FileNotFoundError


def greet(invitation: Invitation) -> tuple[AgentLink, Connection]:
    """Call as the agent of the invitation's machine; return its connection. Raise WrongSecret if it has another key."""
    link = machine_link.call("127.0.0.1", invitation.port, bytes.fromhex(invitation.key))
    connection = link.start(no_target)
    connection.send_bytes(encode(NodeHello(invitation.machine, link.name)))
    return link, connection


def test_only_expected_agents_with_the_key_are_admitted() -> None:
    async def is_refused(other: Invitation) -> bool:
        link, connection = await asyncio.to_thread(greet, other)
        with pytest.raises(EOFError):
            await asyncio.to_thread(connection.recv_bytes)
        link.close()
        return True

    async def call() -> None:
        lost: asyncio.Queue[int] = asyncio.Queue()
        machines = ClusterMachines(Settings(), EnvironmentChanges(), lost.put_nowait)
        machines.add("node-1", "127.0.0.1")
        invitation = replace(machines.invitation, machine=1)
        with pytest.raises(WrongSecret):
            await asyncio.to_thread(greet, replace(invitation, key="00" * 32))
        for stranger in (2, 0):
            assert await is_refused(replace(invitation, machine=stranger))
        link, _ = await asyncio.to_thread(greet, invitation)
        await asyncio.wait_for(machines.joined(1), 60)
        assert await is_refused(invitation)  # An invitation is valid once.
        link.close()
        assert await asyncio.wait_for(lost.get(), 60) == 1
        machines.close()

    asyncio.run(call())


def test_an_agent_serves_until_the_session_ends_and_learns_how_its_children_end() -> None:
    async def start() -> None:
        lost: asyncio.Queue[int] = asyncio.Queue()
        machines = ClusterMachines(Settings(), EnvironmentChanges(), lost.put_nowait)
        machines.add("node-1", "127.0.0.1")
        agent = start_agent(replace(machines.invitation, machine=1), {})
        await asyncio.wait_for(machines.joined(1), 60)
        status = Path(f"/proc/{agent.pid}/status")
        if status.exists():
            ignored = next(line for line in status.read_text().splitlines() if line.startswith("SigIgn"))
            assert not int(ignored.split()[1], 16) & 1 << signal.SIGCHLD - 1
        machines.close()
        assert agent.wait(60) == 0
        assert lost.empty()

    asyncio.run(start())
