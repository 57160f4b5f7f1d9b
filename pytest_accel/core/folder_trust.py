"""Checks, by owner and mode, that other users cannot tamper with a folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

TEMPORARY = "/tmp"
"""The folder for temporary files of all users of a machine, in which their processes can find each other.

It is not `tempfile.gettempdir`, which follows TMPDIR: a batch system sets this for each job, a launcher perhaps for
some of its processes, and macOS for each user.
"""
_ALL_USERS = 1 << 32
_WRITABLE_BY_OTHERS = 0o022


def is_trusted_owner(uid: int) -> bool:
    """Return whether `uid`, the owner of a file, is root or this user, so that no other user controls the file."""
    return uid in (0, os.geteuid(), _unmapped_owner())


def is_open_to_others(mode: int) -> bool:
    """Return whether other users may replace files in a folder of this `mode`: it is writable and not sticky."""
    return bool(mode & _WRITABLE_BY_OTHERS) and not mode & stat.S_ISVTX


def ensure_safe(folder: str) -> None:
    """Raise PermissionError if another user can replace files in `folder` or any parent; it names the unsafe path."""
    named, real = Path(os.path.abspath(folder)), Path(os.path.realpath(folder))
    for path in dict.fromkeys((named, *named.parents, real, *real.parents)):
        facts = os.stat(path)
        if not is_trusted_owner(facts.st_uid):
            raise PermissionError(
                errno.EPERM, f"it belongs to user {facts.st_uid}, who can replace files in it", str(path)
            )
        if is_open_to_others(facts.st_mode):
            raise PermissionError(
                errno.EPERM, "other users can replace files in it: it is writable for them and not sticky", str(path)
            )


def ensure_own_folder(path: str) -> None:
    """Create the folder `path` for this user alone; raise PermissionError if something else has this path."""
    uid = os.geteuid()
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        facts = os.lstat(path)
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != uid or facts.st_mode & 0o077:
            kind = "a folder" if stat.S_ISDIR(facts.st_mode) else "no folder"
            raise PermissionError(
                errno.EPERM,
                f"it is {kind} of user {facts.st_uid} with mode {stat.S_IMODE(facts.st_mode):04o}, and must be a "
                f"folder of user {uid} with mode 0700; remove it, or have its owner or root remove it",
                path,
            ) from None


def _unmapped_owner() -> int | None:
    """Return the user id that a container shows for unmapped users, or None outside such a container.

    The root user of the host, who owns ``/tmp``, is one of the unmapped users (user_namespaces(7)).
    """
    try:
        mapped = [int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()]
        if sum(mapped) >= _ALL_USERS - 1:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="utf-8"))
    except (OSError, ValueError, IndexError):
        return None
