"""The demand for a world, which goes unchanged from a test's driver to the leases, and the holder of a lease."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from os import getpid, getuid
from time import localtime, strftime
from typing import Annotated

import msgspec
from msgspec import Struct

from pytest_accel.core.clock import wall_clock
from pytest_accel.core.record_events import Timestamp
from pytest_accel.core.truncation import cut_end
from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.shared_folder import TEXT_LIMIT, printable, user_name


class WorldDemand(Struct, frozen=True, tag=True):
    """A test's demand for a world, or for a lease without one. The driver makes it once, and sends it to the pool.

    An `Answer` with the same `number` follows, unless the demand is cancelled.
    """

    key: WorldKey
    holder: Holder
    """The driver that waits for the world, with its test."""
    number: int = 0
    """The driver's number for the demand."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a device, as it describes itself in the lock file."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]  # As pid_t.
    """The session's main process; 0 if it is not known. The user and the time are then unknown, too."""
    user: str
    test: str
    """Node id of the test that runs on the device, or another reason why it is held; names the holder if `pid` is 0."""
    since: Timestamp

    @classmethod
    def here(cls, test: str) -> Holder:
        """Return a holder for this process, from now on."""
        return cls(getpid(), user_name(getuid()), test, wall_clock())

    @classmethod
    def unknown(cls, who: str = "an unknown session") -> Holder:
        """Return a holder about whom nothing else is known."""
        return cls(0, "unknown", who, 0.0)

    def __str__(self) -> str:
        """Return ``pid 71 (ada) for test_big.py::test_one since 10:15:00``, or ``an unknown session``."""
        if not self.pid:
            return self.test
        moment = localtime(self.since)
        since = strftime("%H:%M:%S" if moment[:3] == localtime()[:3] else "%Y-%m-%d %H:%M:%S", moment)
        return f"pid {self.pid} ({self.user}) for {cut_end(self.test, TEXT_LIMIT)} since {since}"


def encode(holder: Holder) -> bytes:
    """Return the line for a lock file. A test's id may have any length, and bytes of a path that are no text."""
    return msgspec.json.encode(replace(holder, test=printable(cut_end(holder.test, TEXT_LIMIT)))) + b"\n"


def decode(data: bytes) -> Holder | None:
    """Return the holder in the content of a lock file, or None if the content names none.

    Any user may have written anything to the file: msgspec checks numbers, and texts are made printable.
    """
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        holder = msgspec.json.decode(data, type=Holder)
        return replace(holder, user=printable(holder.user), test=printable(holder.test))
    return None
