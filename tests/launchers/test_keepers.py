"""The driver's side of other launched processes: nobody waits for one whose thread has ended."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection

import pytest

from pytest_accel.launch.outer_kept import Keeper
from pytest_accel.launch.outer_messages import Hello, ServerEnded
from pytest_accel.worlds.messages import SessionSpec


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("what", ["no pickle", "a server that there is not"])
def test_a_message_that_cannot_be_handled(what: str) -> None:
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    hello = Hello(1, 1, (), "/", "/", {}, "here", "here")
    with Connection(theirs.detach()) as other:
        keeper = Keeper(hello, Connection(ours.detach()), lost.set, dict)
        spec = SessionSpec((), "/", (), "/", "/", (), (), (), (), (), False)
        end, _ = pair = socket.socketpair()
        server = keeper.spawn(spec, end)
        if what == "no pickle":
            other.send_bytes(b"no pickle")
        else:
            other.send(ServerEnded(7))
        assert server.wait(None)
        assert lost.wait(60)
        assert keeper.lost
        for one in pair:
            one.close()
