"""The file of ``--accel-record``: one JSON object on a line for each event. Checked when it is read."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from os import getpid
from types import NoneType, UnionType
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

from pytest_accel.core import whole_file
from pytest_accel.core.record_events import SCHEMA, Event, SessionStarted, Stamp

_EVENTS: dict[str, Any] = {event.__name__: event for event in get_args(Event)}


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
        self._host = socket.gethostname()
        self._pid = getpid()
        if path is not None and os.path.exists(path) and not os.path.isfile(path):
            raise RecordError(f"{path} is not a regular file")
        try:
            self._file = _unnamed_file() if path is None else _new_file(path)
        except OSError as error:
            raise RecordError(f"{self.name} cannot be written: {error.strerror}") from None

    def __call__(self, event: Event) -> None:
        """Write `event`; no-op after an error, and in a process forked from this one."""
        if self.error is not None or getpid() != self._pid:
            return
        content = {"event": type(event).__name__, "at": self._clock(), "host": self._host, "pid": self._pid}
        line = _encode(content | _changed_fields(event)).encode("ascii") + b"\n"
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
            recorded = _parse(json.loads(line))
        except (ValueError, OverflowError, RecursionError) as error:
            raise RecordError(f"{name}, line {number}: {error}") from None
        if recorded is not None:
            events.append(recorded)
    if not events:
        raise RecordError(f"{name} has no events")
    if not isinstance(events[0].event, SessionStarted):
        first = type(events[0].event).__name__
        raise RecordError(f"{name} is not a record of --accel-record: its first event is {first}")
    return events


@cache
def _defaults(kind: Any) -> tuple[tuple[str, object], ...]:
    """Return name and default value of each field of a dataclass; `MISSING` for a field without one."""
    return tuple(
        (field.name, field.default if field.default_factory is MISSING else field.default_factory())
        for field in fields(kind)
    )


def _changed_fields(value: Any) -> dict[str, object]:
    """Return the fields of a dataclass instance whose values are not the defaults."""
    return {
        name: content
        for name, default in _defaults(value.__class__)
        # Most fields have the default value itself, so that the identity saves a comparison.
        if (content := getattr(value, name)) is not default and content != default
    }


_encode = json.JSONEncoder(default=_changed_fields).encode


def _parse(content: object) -> Recorded | None:
    """Return the event in a line's content, or None if this version does not know it. Raise ValueError."""
    if not isinstance(content, dict) or not isinstance(content.get("event"), str):
        raise ValueError('expected an object with "event"')
    kind = _EVENTS.get(content["event"])
    if kind is None:
        return None
    stamp: Stamp = _build(Stamp, content, "")
    event: Event = _build(kind, content, "")
    if isinstance(event, SessionStarted) and event.schema != SCHEMA:
        raise ValueError(f"the record has version {event.schema}; this pytest-accel reads version {SCHEMA}")
    return Recorded(event, stamp)


_Reader = Callable[[object, str], Any]
"""A function that checks a value of a JSON document, and returns it as a value of a field.

The second argument is the name of the field. The function raises ValueError.
"""


def _build(kind: Any, content: object, where: str) -> Any:
    """Return the dataclass `kind` with the fields in `content`. A :data:`_Reader` for each `kind`."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must be an object")
    values = {}
    for name, default, read in _fields(kind):
        if name in content:
            values[name] = read(content[name], name)
        elif default is MISSING:
            raise ValueError(f"{name!r} is missing")
    return kind(**values)


@cache
def _fields(kind: Any) -> tuple[tuple[str, object, _Reader], ...]:
    """Return name, default value and reader of each field of a dataclass."""
    hints = get_type_hints(kind)
    return tuple((name, default, _reader(hints[name])) for name, default in _defaults(kind))


def _reader(hint: Any) -> _Reader:
    """Return the reader of values of the type `hint`: those that the fields of events have."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        (inner,) = (_reader(one) for one in arguments if one is not NoneType)
        return lambda value, where: None if value is None else inner(value, where)
    if origin is tuple and arguments[1:] == (...,):
        item = _reader(arguments[0])
        return lambda value, where: tuple(item(one, where) for one in _checked(value, list, where))
    if origin is tuple:
        readers = [_reader(one) for one in arguments]
        return lambda value, where: _pair(value, readers, where)
    if origin is not None:  # A mapping of texts.
        inner = _reader(arguments[1])
        return lambda value, where: {name: inner(one, where) for name, one in _checked(value, dict, where).items()}
    if is_dataclass(hint):
        return lambda value, where: _build(hint, value, where)
    if hint is float:
        return _number
    return lambda value, where: _checked(value, hint, where)


def _checked(value: object, kind: Any, where: str) -> Any:
    """Return `value` if it has the type `kind`; a truth value is no number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where!r} has a wrong value: {str(value)[:80]!r}")
    return value


def _number(value: object, where: str) -> float:
    number = float(_checked(value, (int, float), where))
    if not math.isfinite(number):
        raise ValueError(f"{where!r} must be finite")
    return number


def _pair(value: object, readers: Sequence[_Reader], where: str) -> tuple[Any, ...]:
    if len(_checked(value, list, where)) != len(readers):
        raise ValueError(f"{where!r} must have {len(readers)} values")
    return tuple(read(one, where) for read, one in zip(readers, value, strict=True))  # type: ignore[call-overload]
