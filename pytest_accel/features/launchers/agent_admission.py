"""The TCP port at which the agents of a cluster's nodes connect to the controller."""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from traceback import format_exc

import msgspec

from pytest_accel.core.handshakes import Handshake, Handshakes
from pytest_accel.features.launchers import greeting
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.greeting import RemotePeer
from pytest_accel.features.launchers.mutual_auth import Peer

JOB = ("pytest-accel", "cluster")
"""The job of the mutual authentication, the same for all sessions, since each session has a secret of its own."""
_BACKLOG = 128
"""Connections that may wait until they are accepted."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Invitation:
    """The data that an agent needs to join the session. Any process that knows it can join instead of the agent."""

    node: int
    """The number of the agent's node in the session."""
    addresses: tuple[str, ...]
    """The addresses at which the controller may be reached."""
    port: int
    secret: str = field(repr=False)
    """The session's secret, in hexadecimal digits."""
    rootdir: str
    """The suite's root directory. The agent sends the digests of the files below it."""

    def line(self) -> bytes:
        """Return the line for the agent's standard input, the inverse of :func:`read_invitation`."""
        return json.dumps(msgspec.to_builtins(self)).encode() + b"\n"  # msgspec refuses paths that are not UTF-8.


def read_invitation(line: bytes) -> Invitation:
    """Return the invitation in a line of JSON; raise ValueError if it is malformed."""
    try:
        return msgspec.convert(json.loads(line), Invitation)
    except ValueError as error:
        raise ValueError(f"got an invalid invitation: {error}") from None


class AgentAdmission:
    """Admits the agents that know the session's random secret and whose nodes are expected, each once.

    All handshakes run at the same time, in a thread that :meth:`close` ends.
    """

    def __init__(self, rootdir: str, on_join: Callable[[RemotePeer], None], on_failure: Callable[[str], None]) -> None:
        """`rootdir` is the suite's root directory.

        `on_join` is called, in a thread of this object, with each agent. The rank in its greeting is its node's number.

        `on_failure` is called with the traceback if that thread ends with an error.
        """
        self._rootdir = rootdir
        self._on_join = on_join
        self._on_failure = on_failure
        self._secret = secrets.token_bytes(32)
        self._expected: set[int] = set()
        self._lock = threading.Lock()
        self._stop_read, self._stop_write = os.pipe()
        self._listener = greeting.listen(0, _BACKLOG)
        self._port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="accel-admission", daemon=True)
        self._thread.start()

    def expect(self, node: int) -> Invitation:
        """Admit the agent of `node` when it connects; return the invitation for it."""
        with self._lock:
            self._expected.add(node)
        # Loopback is last: it reaches the controller only from the same machine, which may have no other address.
        return Invitation(node, (*greeting.own_addresses(), _LOOPBACK), self._port, self._secret.hex(), self._rootdir)

    def forget(self, node: int) -> None:
        """Do not admit the agent of `node` any more."""
        with self._lock:
            self._expected.discard(node)

    def close(self) -> None:
        """Stop listening, and wait for the thread; the connections of admitted agents stay open."""
        os.close(self._stop_write)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._listener, Handshakes(self._listener, self._greet, 0, self._stop_read) as handshakes:
                while (met := handshakes.wait(math.inf)) is not None:
                    self._admit(met[0], *met[1])
        except BaseException:
            self._on_failure(f"the thread that admits agents has ended with an error:\n{format_exc()}")
        finally:
            os.close(self._stop_read)

    def _greet(self, call: socket.socket) -> Handshake[tuple[Hello, Peer]]:
        with self._lock:
            expected = frozenset(self._expected)
        hello, peer, _ = yield from greeting.greet_caller(self._secret, JOB, expected, _ignore)
        return hello, peer

    def _admit(self, call: socket.socket, hello: Hello, peer: Peer) -> None:
        try:
            agent = greeting.remote_peer(call, hello, peer)
        except OSError:  # The agent has disconnected. It may connect again.
            call.close()
            return
        with self._lock:
            expected = hello.rank in self._expected
            self._expected.discard(hello.rank)
        if expected:
            self._on_join(agent)
        else:  # Another connection of the same agent was faster.
            call.close()


def _ignore(node: int) -> None:
    """Ignore a caller with another secret: any process may connect."""
