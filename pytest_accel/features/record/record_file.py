"""The file of ``--accel-record``: one JSON object on a line for each event. Checked when it is read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from os import getpid
from typing import BinaryIO, get_args

import msgspec

from pytest_accel.core import whole_file
from pytest_accel.core.record_events import SCHEMA, Event, SessionStarted, Stamp

_EVENTS: dict[str, type[Event]] = {event.__name__: event for event in get_args(Event)}


class RecordError(Exception):
    """Raised for a file that cannot be read as a record, or written. The message names the file."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event of a record, and when and where it was recorded."""

    event: Event
    stamp: Stamp


class RecordFile:
    """Appends events to a file. A :class:`~pytest_accel.core.record_events.Recorder`; thread-safe.

    Each event is one write, so that the file is complete up to the last event whenever the process is killed.
    """

    def __init__(self, path: str | None, clock: Callable[[], float] = time.time) -> None:
        """Replace the file `path`, and create its folder. Raise :class:`RecordError` if that fails.

        Without a path, use a file without a name, which nobody needs to remove. `clock` returns the time of an event.
        """
        self.name = path or "the temporary record of the session"
        """The path, or what the file is."""
        self.error: str | None = None
        """The first error of writing; None if there was none. Nothing is written after it."""
        self._clock = clock
        self._pid = getpid()
        self._process = f',"host":{json.dumps(socket.gethostname())},"pid":{self._pid},'.encode()
        try:
            self._file = _unnamed_file() if path is None else _new_file(path)
        except OSError as error:
            raise RecordError(f"{self.name} cannot be written: {error.strerror}") from None

    def __call__(self, event: Event) -> None:
        """Write `event`; no-op after an error, and in a process forked from this one."""
        if self.error is not None or getpid() != self._pid:
            return
        line = b'{"at":%.6f%b%b\n' % (self._clock(), self._process, _encode(event)[1:])
        try:
            if os.write(self._file.fileno(), line) < len(line):
                self.error = f"{self.name} could not be written in full: no space left"
        except OSError as error:
            self.error = f"{self.name} could not be written: {error.strerror}"

    def read(self) -> list[Recorded]:
        """Return the events so far. Raise :class:`RecordError` if the file cannot be read."""
        try:
            self._file.seek(0)
            return _parse_record(self._file.read(), self.name)
        except OSError as error:
            raise RecordError(f"{self.name} cannot be read: {error.strerror}") from None

    def close(self) -> None:
        """Close the file; later events are not written."""
        self.error = self.error or f"{self.name} is closed"
        with contextlib.suppress(OSError):
            self._file.close()


def _new_file(path: str) -> BinaryIO:
    """Return the new file `path`; an old one is removed. Raise OSError."""
    whole_file.check_folder(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "x+b", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_APPEND, 0o644))


def _unnamed_file() -> BinaryIO:
    import tempfile

    return tempfile.TemporaryFile(buffering=0)


def read_record(path: str | os.PathLike[str]) -> list[Recorded]:
    """Return the events of the record `path` in the order in which they were written.

    Events and fields of later versions of the plugin are left out, and so is an incomplete last line, which a killed
    session leaves. Raise :class:`RecordError` if the file cannot be read, or is not a record.
    """
    try:
        with open(path, "rb") as file:
            return _parse_record(file.read(), os.fspath(path))
    except OSError as error:
        raise RecordError(f"{os.fspath(path)} cannot be read: {error.strerror}") from None


def _parse_record(content: bytes, name: str) -> list[Recorded]:
    """Return the events in the content of the record `name`. Raise :class:`RecordError`."""
    events = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):  # Each complete line ends with a line break.
        try:
            recorded = _parse(line)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise RecordError(f"{name} is not a record of --accel-record: line {number}: {error}") from None
        if recorded is not None:
            events.append(recorded)
    if not events:
        raise RecordError(f"{name} has no events")
    if not isinstance(events[0].event, SessionStarted):
        first = type(events[0].event).__name__
        raise RecordError(f"{name} is not a record of --accel-record: its first event is {first}")
    return events


class _Head(Stamp, frozen=True):
    """The fields of each line."""

    event: str
    """The name of the event."""


_decode_head = msgspec.json.Decoder(_Head).decode


@cache
def _decoder(kind: type[Event]) -> msgspec.json.Decoder[Event]:
    return msgspec.json.Decoder(kind)


def _parse(line: bytes) -> Recorded | None:
    """Return the event of a line, or None if this version does not know it. Raise ValueError."""
    head = _decode_head(line)
    kind = _EVENTS.get(head.event)
    if kind is None:
        return None
    event = _decoder(kind).decode(line)
    if isinstance(event, SessionStarted) and event.schema != SCHEMA:
        raise ValueError(f"the record has version {event.schema}; this pytest-accel reads version {SCHEMA}")
    return Recorded(event, Stamp(head.at, head.host, head.pid))


_encode_event = msgspec.json.Encoder().encode


def _encode(event: Event) -> bytes:
    """Return `event` as a JSON object. A text such as ``\\udcff`` replaces a character that UTF-8 cannot represent."""
    try:
        return _encode_event(event)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(event), ensure_ascii=False)
        return re.sub("[\ud800-\udfff]", lambda match: f"\\\\u{ord(match[0]):x}", text).encode()
