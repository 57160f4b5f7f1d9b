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


@dataclass(frozen=True, slots=True)
class ServerEnded:
    number: int


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


@dataclass(frozen=True, slots=True)
class KillServer:
    number: int


@dataclass(frozen=True, slots=True)
class End:
    """Come to an end, when the driver has."""

    status: int
