"""What the processes under a launcher say to each other: the driver, and the keepers of the other ranks."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pytest_accel.core.handshakes import Handshake, Refused
from pytest_accel.core.messages import SessionSpec

_LENGTH = struct.Struct("<I")
_LONGEST_HELLO = 1 << 24
"""Bytes: command lines may be long."""

# Keeper to driver


@dataclass(frozen=True, slots=True)
class Hello:
    """Who is there, and what it was started for."""

    rank: int
    pid: int
    args: tuple[str, ...]
    """Of the command line."""
    directory: str
    """Where it was started."""
    rootdir: str
    masks: Mapping[str, str]
    """The variables that are there which say what devices a process sees."""
    host: str = ""
    """The machine's name."""
    node: str = ""
    """What tells the machine from the others: alike for processes that can hand each other files and signals."""

    def as_json(self) -> dict[str, object]:
        """Return what :func:`hello_of` makes a greeting of again."""
        return asdict(self)

    def pack(self) -> bytes:
        """Return the bytes for :func:`receive_hello`."""
        data = json.dumps(self.as_json()).encode()
        return _LENGTH.pack(len(data)) + data


def receive_hello() -> Handshake[Hello]:
    """Wait for what :meth:`Hello.pack` has made."""
    (length,) = _LENGTH.unpack((yield _LENGTH.size))
    if not 0 < length <= _LONGEST_HELLO:
        raise Refused("says nothing that a launched process would say")
    return hello_of(json.loads((yield length)))


def hello_of(value: object) -> Hello:
    """Return the greeting that came as JSON; :class:`Refused` where it is none."""
    match value:
        case {
            "rank": int(rank),
            "pid": int(pid),
            "args": list(args),
            "directory": str(directory),
            "rootdir": str(rootdir),
            "masks": dict(masks),
            "host": str(host),
            "node": str(node),
        }:
            shown = {str(name): str(mask) for name, mask in masks.items()}
            return Hello(rank, pid, tuple(map(str, args)), directory, rootdir, shown, host, node)
    raise Refused("says nothing that a launched process would say")


@dataclass(frozen=True, slots=True)
class ServerEnded:
    number: int
    log: str = ""
    """The end of what it has written, where the driver cannot read it."""


# Driver to keeper


@dataclass(frozen=True, slots=True)
class Welcome:
    """All have come."""

    pid: int
    """The driver's."""


@dataclass(frozen=True, slots=True)
class StartServer:
    """Start a fork server; the descriptor of its end of the connection to the driver follows."""

    number: int
    """So manieth of this keeper."""
    spec: SessionSpec
    environment: Mapping[str, str | None]
    """What plugins and conftests of the driver have changed; None: removed."""
    token: str = ""
    """A file that the driver has made: where another machine finds it, the two share a file system."""


@dataclass(frozen=True, slots=True)
class KillServer:
    number: int


@dataclass(frozen=True, slots=True)
class End:
    """Come to an end, when the driver has."""

    status: int
