"""The driver's side of other launched processes: nobody waits for one whose thread has ended."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection
from pickle import UnpicklingError

import pytest

from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.nodes.agent_messages import Hello, ServerEnded
from pytest_accel.nodes.local_agent_client import LocalAgentClient


@pytest.mark.parametrize("what", ["no pickle", "a server that there is not"])
def test_a_message_that_cannot_be_handled_is_reported(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    hello = Hello(1, 1, (), "/", "/", {}, "here", "here")
    with Connection(theirs.detach()) as other:
        client = LocalAgentClient(hello, Connection(ours.detach()), lost.set, dict)
        spec = SessionSpec((), "/", (), "/", "/", (), (), (), (), (), False)
        end, _ = pair = socket.socketpair()
        server = client.spawn(spec, end)
        if what == "no pickle":
            other.send_bytes(b"no pickle")
        else:
            other.send(ServerEnded(7))
        assert server.wait(None)
        assert lost.wait(60)
        assert client.lost
        for thread in [thread for thread in threading.enumerate() if thread.name == "accel-agent-1"]:
            thread.join(60)
        assert [one.exc_type for one in raised] == [UnpicklingError if what == "no pickle" else IndexError]
        for one in pair:
            one.close()
