"""Tests of the agents that join a session on a cluster, and of the port that admits them."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from pytest_accel.features.launchers import machine_link
from pytest_accel.features.launchers.machine_link import AgentLink, WrongSecret
from pytest_accel.features.ray.ray_cluster import ClusterMachines
from pytest_accel.features.ray.ray_messages import Invitation, NodeHello
from pytest_accel.settings.options import Settings


def greet(invitation: Invitation) -> AgentLink:
    """Call as the agent of the invitation's machine. Raise WrongSecret if it has another key."""
    hello = NodeHello(invitation.machine)
    key = bytes.fromhex(invitation.key)
    return machine_link.call(["127.0.0.1"], invitation.port, key, lambda *_: hello, "the driver", 0)


def test_only_expected_agents_with_the_key_are_admitted() -> None:
    async def call() -> None:
        lost: asyncio.Queue[int] = asyncio.Queue()
        machines = ClusterMachines(Settings(), lost.put_nowait)
        machines.add("node-1", "127.0.0.1")
        invitation = replace(machines.invitation, machine=1)
        with pytest.raises(WrongSecret):
            await asyncio.to_thread(greet, replace(invitation, key="00" * 32))
        strangers = [await asyncio.to_thread(greet, replace(invitation, machine=number)) for number in (2, 0)]
        link = await asyncio.to_thread(greet, invitation)
        await asyncio.wait_for(machines.joined(1), 60)
        admitted = dict(machines.clients)
        strangers.append(await asyncio.to_thread(greet, invitation))  # An invitation is valid once.
        await asyncio.sleep(0.5)
        assert machines.clients == admitted
        assert list(admitted) == [1]
        for caller in (*strangers, link):
            await asyncio.to_thread(caller.close)
        assert await asyncio.wait_for(lost.get(), 60) == 1
        machines.close()

    asyncio.run(call())
