"""The first messages between the controller and the agent of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from pytest_accel.messages.struct_messages import encode


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
        """Return the line for the agent's standard input."""
        return encode(self) + b"\n"


class NodeHello(Struct, frozen=True):
    """The greeting of an agent."""

    machine: int
    """The number of the agent's machine in the session."""
    host: str
    """The machine's host name."""
    code: Mapping[str, str]
    """The code on the machine (`suite_code`)."""
    variables: tuple[str, ...]
    """The names of the environment variables that the machine sets."""
