"""The devices that a rank holds, in the variable `HELD`, for sessions that its test starts.

A test may start pytest: with pytester, in a subprocess, under a launcher. Such an inner session leases the devices of
the rank in which it runs, and sees no others. If it waited for more, two tests could wait for each other's devices
forever.

The variable counts only in descendants of the rank that it names. It also names the folder of the locks that these
sessions take (`leases/leases.py`), since the test has the locks of the devices.
"""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

HELD = "PYTEST_ACCEL_HELD"
"""The environment variable: a `HeldDevices` in JSON."""


class HeldDevices(msgspec.Struct, frozen=True):
    """The devices that a rank holds: the devices of its world that it sees."""

    rank: int
    """Process id of the rank."""
    server: int
    """Process id of the rank's parent, which is the parent of its world's other ranks, too."""
    kind: str
    devices: tuple[str, ...]
    """Ids of the devices."""
    fractions: dict[str, float]
    """Fraction of the memory of each device that the rank may use; empty if it may use all."""
    lock_folder: str
    """Folder in which the rank's session has its device locks."""
    inner_lock_folder: str
    """Folder for the device locks of the sessions inside the rank, or inside any rank that sees the same devices."""


def held_here() -> HeldDevices | None:
    """Return the devices of the rank that is this process or one of its ancestors; None outside of ranks."""
    with suppress(msgspec.MsgspecError):
        held = msgspec.json.decode(os.environ.get(HELD, ""), type=HeldDevices)
        import psutil  # Imported here, because only sessions inside a rank need it.

        with suppress(psutil.Error):  # Without /proc, no rank can be started either.
            this = psutil.Process()
            if held.rank in {process.pid for process in (this, *this.parents())}:
                return held
    return None
