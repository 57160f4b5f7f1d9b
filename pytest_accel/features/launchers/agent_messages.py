"""Messages between the driver and the agents of a session under a launcher or on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from pytest_accel.features.launchers.lease_messages import (
    InventoryReply,
    InventoryRequest,
    LeaseFailed,
    LeaseGranted,
    LeaseLost,
    LeaseReturn,
    LeaseUsers,
    LeaseWanted,
    RequestLease,
    UseSettings,
)
from pytest_accel.features.launchers.suite_code import SuiteCode
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode

# The greeting


@dataclass(frozen=True, slots=True)
class Invitation:
    """The data that an agent needs to join the session. Any process that knows it can join instead of the agent."""

    machine: int
    """The number of the agent's machine in the session."""
    addresses: tuple[str, ...]
    """The addresses at which the controller may be reached."""
    port: int
    key: str = field(repr=False)
    """The key of the controller's end of the connections, in hexadecimal digits."""
    rootdir: str
    """The suite's root directory. The agent sends the digests of the files below it."""
    log: str | None = None
    """The path of the session's log (`core/log.py`), to which the agent appends its steps; None if there is none."""

    def line(self) -> bytes:
        """Return the line for the agent's standard input, the inverse of :func:`read_invitation`."""
        return encode(self) + b"\n"


def read_invitation(line: bytes) -> Invitation:
    """Return the invitation in a line of JSON; raise ValueError if it is malformed."""
    try:
        invitation: Invitation = decode(line, Invitation)
    except ValueError as error:
        raise ValueError(f"got an invalid invitation: {error}") from None
    return invitation


class Hello(Struct, frozen=True, tag=True):
    """The greeting: the identity and arguments of a launched process, or of the agent of a cluster's machine.

    The greeting is the first message to rank 0, or to the controller of a session on a cluster.
    """

    rank: int
    """The rank of a launched process; the number of the machine of a cluster's agent."""
    pid: int
    args: tuple[str, ...]
    """The arguments of the command line."""
    directory: str
    """The working directory at the start."""
    rootdir: str
    masks: Mapping[str, str]
    """The mask variables of this process that are set: they limit which devices it sees."""
    host: str = ""
    """The machine's host name."""
    machine: str = ""
    """The result of `machine_identity`, equal for processes that can pass each other files and signals."""
    code: SuiteCode | None = None
    """The code of the suite on the machine of a cluster; None for a process that a launcher has started."""
    variables: tuple[str, ...] = ()
    """The names of the environment variables that the machine of a cluster sets."""


class Meeting(Struct, frozen=True, tag=True):
    """The answer to the greeting of a process on another machine."""

    remote: bool
    """True if the agent is to serve over this connection. If not, the process is on the driver's machine, where it
    connects over a Unix socket, or the agent of a cluster's machine is not wanted."""


class ClockReading(Struct, frozen=True, tag=True):
    """The clock of one end of the connection. Each question of an agent is answered with the driver's."""

    seconds: float


# Agent to driver


class ServerEnded(Struct, frozen=True, tag=True):
    """A fork server has exited, or could not be started."""

    number: int
    log: str = ""
    """The end of the server's log, or the traceback of the failed start; empty if the driver can read the log."""


class Ending(Struct, frozen=True, tag=True):
    """The agent has received :class:`End`, and waits for the driver's exit."""


ToDriver = (
    Hello | ClockReading | Ending | ServerEnded | InventoryReply | LeaseGranted | LeaseFailed | LeaseWanted | LeaseLost
)


# Driver to agent


class StartServer(Struct, frozen=True, tag=True):
    """Start a fork server.

    On the driver's machine, the descriptor of the server's end of the connection to the driver follows.
    """

    number: int
    """The number of the server among those of this agent."""
    spec: SessionSpec
    environment: Mapping[str, str | None]
    """The environment variables that the driver's plugins and conftests have changed; None for a removed one."""
    token: str = ""
    """The path of a file that the driver has created: a machine that finds it shares the driver's file system."""


class KillServer(Struct, frozen=True, tag=True):
    """Kill a fork server."""

    number: int


class End(Struct, frozen=True, tag=True):
    """Exit with `status` once the driver has exited."""

    status: int
    driver: int
    """The driver's process id."""


ToAgent = (
    Meeting
    | ClockReading
    | StartServer
    | KillServer
    | End
    | UseSettings
    | InventoryRequest
    | RequestLease
    | LeaseReturn
    | LeaseUsers
)
