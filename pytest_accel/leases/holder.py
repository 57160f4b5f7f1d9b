"""The holder of a lease, as its session describes it to other sessions and to users."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from json import loads
from os import getpid, getuid
from typing import Annotated, Any

import msgspec

from pytest_accel.core.clock import wall_clock
from pytest_accel.core.truncation import cut_end
from pytest_accel.leases.shared_folder import TEXT_LIMIT, printable, user_name

_LARGEST_PID = 2**31 - 1
"""The largest number that pid_t holds."""
_LAST_MOMENT = 1e11
"""Seconds since the epoch (the year 5138): a later time is invalid, and too large for some functions."""
_PROCESS = re.compile(rb"\[(\d{1,10}), (\d{1,11}(?:\.\d{1,10})?)[\],]")
"""One of the processes in a record, as `json.dumps` writes it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a device, as it describes itself in the lock file."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST_PID)]
    """The session's main process; 0 if it is not known. The user and the time are then unknown, too."""
    user: str
    test: str
    """Node id of the test that runs on the device, or another reason why it is held; without a pid, who holds it."""
    since: Annotated[float, msgspec.Meta(ge=0, le=_LAST_MOMENT)]
    """Seconds since the epoch."""
    pids: tuple[int, ...] = ()
    """The processes that use the device, as far as known."""
    processes: tuple[tuple[int, float], ...] = ()
    """Pid and creation time (``psutil.Process.create_time``) of every process that uses the device."""

    @classmethod
    def here(cls, test: str) -> Holder:
        """Return a holder for this process, from now on, with no process on the device yet."""
        return cls(getpid(), user_name(getuid()), test, wall_clock())

    @classmethod
    def unknown(cls, who: str = "an unknown session", processes: tuple[tuple[int, float], ...] = ()) -> Holder:
        """Return a holder about whom nothing else is known."""
        return cls(0, "unknown", who, 0.0, processes=processes)

    def __str__(self) -> str:
        """Return ``pid 71 (ada) for test_big.py::test_one``, or ``an unknown session``."""
        if self.pid:
            return f"pid {self.pid} ({self.user}) for {cut_end(self.test, TEXT_LIMIT)}"
        named = cut_end(", ".join(str(pid) for pid, _ in self.processes), TEXT_LIMIT)
        return f"{self.test}, whose record names pid {named}" if named else self.test

    def as_json(self) -> dict[str, object]:
        """Return the content of the lock file.

        Texts are truncated as readers truncate them: the id of a parametrized test may have any length, and a shared
        device has the tests of several leases. The processes come first, so that they survive an incomplete write.
        """
        return {
            "processes": self.processes,
            "pid": self.pid,
            "user": cut_end(self.user, TEXT_LIMIT),
            "test": cut_end(self.test, TEXT_LIMIT),
            "since": self.since,
        }


def encode(holder: Holder) -> bytes:
    """Return the line for a lock file. The test is truncated: the id of a parametrized one may have any length."""
    if len(holder.test) > TEXT_LIMIT:
        holder = replace(holder, test=cut_end(holder.test, TEXT_LIMIT))
    return _ENCODER.encode(holder) + b"\n"


def decode(data: bytes) -> Holder | None:
    """Return the holder in the content of a lock file, or None if the content names none.

    Any user may have written anything to the file: msgspec checks numbers, and texts are made printable.
    """
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        holder = _DECODER.decode(data)
        return replace(holder, user=printable(holder.user), test=printable(holder.test))
    return None


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Holder)


def parse_holder(data: bytes) -> Holder | None:
    """Return the holder in the content of a lock file, or None if the content names none.

    Any user may have written anything to the file, so numbers are checked and texts are made printable.

    Content that is not a record as a session writes it may still be the rest of one, for example because the disk was
    full. It counts as a record of an unknown session if it names processes: the device is then held as long as one of
    them lives. Content without processes holds nothing. Holding a device for all content that cannot be parsed was
    rejected: mere garbage would take the device away until somebody removes the file.
    """
    try:
        content = loads(data)
        match content:
            case {
                "pid": int(pid),
                "user": str(user),
                "test": str(test),
                "since": int() | float() as since,
                "processes": list(processes),
            } if 0 < pid <= _LARGEST_PID and 0 <= since <= _LAST_MOMENT:
                return Holder(pid, printable(user), printable(test), float(since), processes=_processes(processes))
    except (ValueError, TypeError, RecursionError):
        pass
    named = _processes([(int(pid), float(created)) for pid, created in _PROCESS.findall(data)])
    return Holder.unknown(processes=named) if named else None


def _processes(entries: Sequence[Any]) -> tuple[tuple[int, float], ...]:
    """Return the valid ones of `entries`. Raise ValueError or TypeError for one that is not a pair."""
    return tuple(
        (pid, float(created))
        for pid, created in entries
        if isinstance(pid, int) and 0 < pid <= _LARGEST_PID
        if isinstance(created, (int, float)) and 0 <= created <= _LAST_MOMENT
    )
