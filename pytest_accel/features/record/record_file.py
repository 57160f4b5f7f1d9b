"""The file of ``--accel-record``: one JSON object on a line for each event. Checked when it is read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
from collections.abc import Mapping
from os import getpid
from pathlib import Path
from time import time
from typing import IO, Annotated

import msgspec
from msgspec import Meta, Struct, field

from pytest_accel.core import whole_file
from pytest_accel.core.record_events import RankPhase, Timestamp

SCHEMA = 2
"""Version of the events. It changes if a field is removed or changes its meaning, not if fields or events are added."""


class RankPlace(Struct, frozen=True):
    """Machine, ids of devices, and fraction of each device of one rank."""

    machine: str = ""
    devices: tuple[str, ...] = ()
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0


class Event(Struct, frozen=True):
    """A line of a record, as ``docs/reference/record.md`` describes it.

    An event has some of the fields; the others have the values below.
    """

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
    machine: str = ""
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


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


class RecordError(Exception):
    """Raised for a file that cannot be read as a record, or written. The message names the file."""


class RecordFile:
    """Appends events to a file. A :class:`~pytest_accel.core.record_events.Recorder`; thread-safe.

    Each event is one write, so that the file is complete up to the last event whenever the process is killed.
    """

    def __init__(self, path: str | None) -> None:
        """Replace the file `path`; with None, keep events in memory. Raise :class:`RecordError` if that fails."""
        self.name = path or "the record of the session"
        self.error: str | None = None
        """The first error of writing, after which nothing is written."""
        self._process = {"host": socket.gethostname(), "pid": getpid()}
        try:
            self._file: IO[bytes] = io.BytesIO() if path is None else _new_file(path)
        except OSError as error:
            raise RecordError(f"{self.name} cannot be written: {error.strerror}") from None

    def __call__(self, event: str, /, **fields: object) -> None:
        """Write an event; no-op after an error, and in a process forked from this process."""
        if self.error is not None or getpid() != self._process["pid"]:
            return
        data = {"at": round(time(), 6), **self._process, "event": event, **fields}
        try:
            line = _encode(data) + b"\n"
        except UnicodeEncodeError:  # A question mark replaces a character that UTF-8 cannot represent.
            line = f"{json.dumps(msgspec.to_builtins(data), ensure_ascii=False)}\n".encode(errors="replace")
        try:
            while line := line[self._file.write(line) :]:
                pass  # A full disk takes a part. The rest raises the error.
        except OSError as error:
            self.error = f"{self.name} is not complete: {error.strerror}"

    def read(self) -> list[Event]:
        """Return the events so far. Raise :class:`RecordError` if the file cannot be read."""
        try:
            self._file.seek(0)
            return _parse(self._file.read(), self.name)
        except OSError as error:
            raise RecordError(f"{self.name} cannot be read: {error.strerror}") from None

    def close(self) -> None:
        """Close the file; later events are not written."""
        self.error = self.error or f"{self.name} is closed"
        with contextlib.suppress(OSError):
            self._file.close()


def _new_file(path: str) -> IO[bytes]:
    """Return the new file `path`; an old file is removed. Raise OSError."""
    whole_file.check_folder(path)
    Path(path).unlink(missing_ok=True)
    # A thread of the pool may write while `read` is at the beginning.
    return open(path, "x+b", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_APPEND, 0o644))


def read_record(path: str | os.PathLike[str]) -> list[Event]:
    """Return the events of the record `path` in the order in which they were written.

    An incomplete last line, which a killed session leaves, is left out, and so are fields of later versions of the
    plugin. Raise :class:`RecordError` if the file cannot be read, or is not a record.
    """
    try:
        with open(path, "rb") as file:
            return _parse(file.read(), os.fspath(path))
    except OSError as error:
        raise RecordError(f"{os.fspath(path)} cannot be read: {error.strerror}") from None


def _parse(content: bytes, name: str) -> list[Event]:
    events: list[Event] = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):  # Each complete line ends with a line break.
        try:
            event = _decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RecordError(f"{name} is not a record of --accel-record: line {number}: {error}") from None
        if not events and event.event != "SessionStarted":
            raise RecordError(f"{name} is not a record of --accel-record: its first event is {event.event}")
        if not events and event.schema != SCHEMA:
            raise RecordError(f"{name} has version {event.schema}; this pytest-accel reads version {SCHEMA}")
        events.append(event)
    if not events:
        raise RecordError(f"{name} has no events")
    return events
