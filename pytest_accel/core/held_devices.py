"""The devices that a rank holds, as sessions that its test starts find them.

A test may start pytest: with pytester, in a subprocess, under a launcher. Such an inner session leases the devices of
the rank in which it runs, and sees no others. If it waited for more, two tests could wait for each other's devices
forever.

Each rank with devices writes a record into the private folder of its session. A session looks for a record of one of
its ancestors: no variable has to survive, and a process that outlives the rank finds nothing. The folder belongs to
this user, so no other user can grant devices by a record. The ancestor lives, so its lease lasts: a lease is returned
when its processes have ended.

The inner sessions of one rank exclude each other by lock files in a folder of their own (`inner_lock_folder`).
"""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from pathlib import Path

import msgspec

from pytest_accel.core.kill import session_of
from pytest_accel.core.paths import held_path

_SIZE = 1 << 20
"""Maximum number of bytes of a record."""


class HeldDevices(msgspec.Struct, frozen=True):
    """The devices that a rank holds: those of its world that it sees."""

    rank: int
    """Process id of the rank."""
    server: int
    """Process id of the rank's parent, which is the parent of its world's other ranks, too."""
    kind: str
    devices: tuple[str, ...]
    """Ids of the devices."""
    fractions: dict[str, float]
    """Fraction of the memory of each device that the rank may use; empty: all of it."""
    lock_folder: str
    """Folder in which the rank's session has its device locks."""
    inner_lock_folder: str
    """Folder for the device locks of the sessions inside the rank, or inside any that sees the same devices."""

    def write(self, directory: str, world: int, rank: int) -> None:
        """Write the record of the rank, which belongs to the session in `directory`."""
        with open(held_path(directory, world, rank), "wb") as file:
            file.write(msgspec.json.encode(self))

    def locks_for(self, kind: str, folder: Path) -> Path:
        """Return the folder for the locks of devices of `kind` in an inner session, which would use `folder` else.

        An inner session with another folder than the rank's session does not share locks with that one.
        """
        return Path(self.inner_lock_folder) if (kind, str(folder)) == (self.kind, self.lock_folder) else folder


def held_here() -> HeldDevices | None:
    """Return the devices of the rank that is this process or its nearest ancestor with a record; None without one."""
    import psutil  # Imported here, because only sessions with marked tests need it.

    with contextlib.suppress(psutil.Error):  # Without /proc, no rank can be started either.
        this = psutil.Process()
        for process in (this, *this.parents()):
            with contextlib.suppress(psutil.Error):  # The process of another user, or one that has ended.
                directory = session_of(process.environ())
                if directory and (found := _record_of(process.pid, directory)) is not None:
                    return found
    return None


def _record_of(pid: int, directory: str) -> HeldDevices | None:
    """Return the record of the rank `pid` of the session in `directory`, or None if there is none to be trusted."""
    with contextlib.suppress(OSError):
        facts = os.lstat(directory)
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            return None
        for path in glob.glob(held_path(glob.escape(directory), "*", "*")):
            with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "rb") as file:
                found = msgspec.json.decode(file.read(_SIZE), type=HeldDevices)
                if found.rank == pid:
                    return found
    return None
