"""What the processes under a launcher say to each other: the driver, and the keepers of the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_accel.worlds.messages import SessionSpec

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
class Place:
    """Where the process is, as seen from the driver, which goes on talking to it in one way or the other."""

    far: bool
    """Whether it is on another machine; on the same, they meet once more on a socket that can hand on descriptors."""


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
