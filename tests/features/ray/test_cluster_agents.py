"""Tests of the agents that join a session on a cluster, and of the port that admits them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from pytest_accel.features.launchers import machine_link
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.machine_link import AgentLink, WrongSecret
from pytest_accel.features.ray.ray_cluster import ClusterStarter
from pytest_accel.features.ray.ray_messages import AgentEnded, AgentStarted, Invitation, ToHelper
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.settings.options import Settings


def greet(invitation: Invitation) -> AgentLink:
    """Call as the agent of the invitation's machine. Raise WrongSecret if it has another key."""
    key, hello = bytes.fromhex(invitation.key), Hello(invitation.machine, 1, host="node-1")
    return machine_link.call(["127.0.0.1"], invitation.port, key, hello, "the driver", 0)


def test_only_one_agent_with_the_key_is_admitted_for_each_machine_and_its_loss_is_reported() -> None:
    async def call() -> None:
        ours, theirs = unix_sockets.pair()
        helper = Connection(theirs.detach())
        cluster = SimpleNamespace(settings=Settings(), connection=Connection(ours.detach()))
        here, unused = cast(Any, Mock()), cast(Any, Mock())
        starter = ClusterStarter(unused, here, unused, cast(Any, cluster))
        starter.warm()
        here.warm.assert_called_once_with()  # Other tests of pytest's machine use the same fork server.
        helper.send_bytes(encode(AgentStarted("node-1", "127.0.0.1")))
        invitation = replace(decode(helper.recv_bytes(), ToHelper), machine=1)
        with pytest.raises(WrongSecret):
            await asyncio.to_thread(greet, replace(invitation, key="00" * 32))
        link = await asyncio.to_thread(greet, invitation)
        await asyncio.wait_for(starter._join_of(1), 60)
        admitted = dict(starter._clients)
        other = await asyncio.to_thread(greet, invitation)  # An invitation is valid once.
        await asyncio.to_thread(other.close)
        await asyncio.to_thread(link.close)
        ended = await asyncio.to_thread(lambda: decode(helper.recv_bytes(), ToHelper))
        assert ended == AgentEnded(1, "the controller has lost it")
        assert starter._clients == admitted
        assert [client.machine for client in admitted.values()] == ["node-1"]
        assert await starter.stop()

    asyncio.run(call())
