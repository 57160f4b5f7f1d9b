"""Messages between the driver and the agents of a session under a launcher or on a cluster."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from pytest_accel.core.handshakes import Handshake, Refused
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.features.launchers.suite_code import SuiteCode

_LENGTH = struct.Struct("<I")
_LONGEST_HELLO = 1 << 24
"""Maximum size of a greeting, in bytes; command lines may be long."""

# Agent to driver


class Hello(Struct, frozen=True):
    """The greeting: the identity and arguments of a launched process, or of the agent of a cluster's node.

    The greeting is the first message to rank 0, or to the controller of a session on a cluster.
    """

    rank: int
    """The rank of a launched process; the number of the node of a cluster's agent."""
    pid: int
    args: tuple[str, ...]
    """The arguments of the command line."""
    directory: str
    """The working directory at the start."""
    rootdir: str
    masks: Mapping[str, str]
    """The mask variables of this process that are set: they limit which devices it sees."""
    host: str = ""
    """The node's host name."""
    node: str = ""
    """The result of `tcp_rendezvous.node_identity`, equal for processes that can pass each other files and signals."""
    code: SuiteCode | None = None
    """The code of the suite on the node of a cluster; None for a process that a launcher has started."""
    variables: tuple[str, ...] = ()
    """The names of the environment variables that the node of a cluster sets."""

    def as_json(self) -> dict[str, object]:
        """Return a value for JSON, the inverse of :func:`hello_of`."""
        found: dict[str, object] = msgspec.to_builtins(self)
        return found

    def pack(self) -> bytes:
        """Return the bytes for :func:`receive_hello`."""
        data = json.dumps(self.as_json()).encode()
        return _LENGTH.pack(len(data)) + data


def receive_hello() -> Handshake[Hello]:
    """Wait for the bytes that :meth:`Hello.pack` returns."""
    (length,) = _LENGTH.unpack((yield _LENGTH.size))
    if not 0 < length <= _LONGEST_HELLO:
        raise Refused("sent an invalid greeting")
    return hello_of(json.loads((yield length)))


def hello_of(value: object) -> Hello:
    """Return the greeting in a JSON value; raise :class:`Refused` if it is malformed."""
    try:
        return msgspec.convert(value, Hello)
    except msgspec.ValidationError as error:
        raise Refused(f"sent an invalid greeting: {error}") from None


class ServerEnded(Struct, frozen=True):
    """A fork server has exited, or could not be started."""

    number: int
    log: str = ""
    """The end of the server's log, or the traceback of the failed start; empty if the driver can read the log."""


# Driver to agent


class StartServer(Struct, frozen=True):
    """Start a fork server.

    On the driver's node, the descriptor of the server's end of the connection to the driver follows.
    """

    number: int
    """The number of the server among those of this agent."""
    spec: SessionSpec
    environment: Mapping[str, str | None]
    """The environment variables that the driver's plugins and conftests have changed; None for a removed one."""
    token: str = ""
    """The path of a file that the driver has created: a node that finds it shares the driver's file system."""


class KillServer(Struct, frozen=True):
    """Kill a fork server."""

    number: int


class End(Struct, frozen=True):
    """Exit with `status` once the driver has exited."""

    status: int
    driver: int
    """The driver's process id."""
