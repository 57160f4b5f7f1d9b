"""The holder of a lease, as its session describes it to other sessions and to users."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass

from pytest_accel.leases.shared_files import printable, user_name

_LARGEST_PID = 2**31 - 1
"""The largest number that pid_t holds."""
_LAST_MOMENT = 1e11
"""Seconds since the epoch (the year 5138): a later time is invalid, and too large for some functions."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a device, as it describes itself in the lock file."""

    pid: int
    """The session's main process; 0 if it is not known."""
    user: str
    test: str
    """Node id of the test that runs on the device, or another reason why the device is held."""
    since: float
    """Seconds since the epoch."""
    processes: tuple[tuple[int, float], ...] = ()
    """Pid and creation time (``psutil.Process.create_time``) of every process that uses the device."""

    @classmethod
    def here(cls, test: str) -> Holder:
        """Return a holder for this process, from now on, with no process on the device yet."""
        return cls(os.getpid(), user_name(os.getuid()), test, time.time())

    def __str__(self) -> str:
        """Return ``pid 71 (ada) for test_big.py::test_one``."""
        return f"pid {self.pid} ({self.user}) for {self.test}"

    def as_json(self) -> dict[str, object]:
        """Return the content of the lock file."""
        return {name: getattr(self, name) for name in self.__slots__}


def parse_holder(data: bytes) -> Holder | None:
    """Return the holder in the content of a lock file, or None if the content is invalid.

    Any user may have written anything to the file, so numbers are checked and texts are made printable.
    """
    try:
        content = json.loads(data)
        match content:
            case {
                "pid": int(pid),
                "user": str(user),
                "test": str(test),
                "since": int() | float() as since,
                "processes": list(processes),
            } if 0 < pid <= _LARGEST_PID and 0 <= since <= _LAST_MOMENT:
                named = tuple(
                    (number, float(created))
                    for number, created in processes
                    if isinstance(number, int) and 0 < number <= _LARGEST_PID
                    if isinstance(created, (int, float)) and 0 <= created <= _LAST_MOMENT
                )
                return Holder(pid, printable(user), printable(test), float(since), named)
    except (ValueError, TypeError, RecursionError):
        pass
    return None
