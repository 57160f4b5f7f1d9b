"""An event of a session's record (``--accel-record``). ``docs/reference/record.md`` describes the events and fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct, field

from pytest_accel.core.record_events import RankPhase, Timestamp

SCHEMA = 1
"""Version of the events. It changes if a field is removed or changes its meaning, not if fields or events are added."""


class RankPlace(Struct, frozen=True):
    """Machine, ids of devices, and fraction of each device of one rank."""

    machine: int = 0
    devices: tuple[str, ...] = ()
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0


class Event(Struct, frozen=True):
    """A line of a record. An event has some of the fields; the others have the values below."""

    at: Timestamp
    host: str
    pid: int
    event: str

    # The session
    schema: int = 0
    session: str = ""
    version: str = ""
    command: tuple[str, ...] = ()
    root: str = ""
    shard: tuple[int, int] | None = None
    tests: tuple[str, ...] = ()
    deselected: tuple[str, ...] = ()
    skipped_files: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False
    status: int = 0

    # Machines and devices
    slots: int = 0
    machine: int = 0
    name: str = ""
    device: str = ""
    kind: str | None = None
    index: int = 0
    memory: int | None = None

    # Worlds
    request: int = 0
    world: int = 0
    about: str = ""
    why: str = ""
    places: tuple[RankPlace, ...] = ()
    pids: tuple[int, ...] = ()
    reused: bool = False
    killed: bool = False

    # Tests
    test: str = ""
    worker: str = ""
    when: str = ""
    outcome: str = ""
    start: Timestamp = 0.0
    stop: Timestamp = 0.0
    file: str = ""
    line: int | None = None
    ranks: tuple[RankPhase, ...] = ()
    xfail: str | None = None
    skip: str | None = None
    missing: str | None = None
    headline: str = ""
    failure: str = ""
    place: tuple[str, int] | None = None
    failed_ranks: tuple[int, ...] = ()
    output: Mapping[str, str] = field(default_factory=dict)
    peaks: Mapping[str, int] = field(default_factory=dict)
