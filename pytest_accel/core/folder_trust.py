"""Which folders other users cannot tamper with, by the owners and modes that the kernel shows."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_ALL_USERS = 1 << 32
_WRITABLE_BY_OTHERS = 0o022


def is_trusted_owner(uid: int) -> bool:
    """Return whether what belongs to `uid` is safe from other users: it is root's, or this user's."""
    return uid in (0, os.geteuid(), _unmapped_owner())


def is_open_to_others(mode: int) -> bool:
    """Return whether other users may replace what is in a folder of this `mode`: it is writable, and not sticky."""
    return bool(mode & _WRITABLE_BY_OTHERS) and not mode & stat.S_ISVTX


def ensure_safe(folder: str) -> None:
    """Raise PermissionError, with the path in question, where another user can replace what is in `folder`."""
    named, real = Path(os.path.abspath(folder)), Path(os.path.realpath(folder))
    for path in dict.fromkeys((named, *named.parents, real, *real.parents)):
        facts = os.stat(path)
        if not is_trusted_owner(facts.st_uid):
            raise PermissionError(
                errno.EPERM, f"it belongs to user {facts.st_uid}, who can replace what is in it", str(path)
            )
        if is_open_to_others(facts.st_mode):
            raise PermissionError(
                errno.EPERM, "other users can replace what is in it: they may write, and it is not sticky", str(path)
            )


def ensure_own_folder(path: str) -> None:
    """Make the folder `path` for this user alone, or raise PermissionError where there is something else."""
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
    """Return the owner that a container shows for users who are not mapped in it; None outside of such a container.

    The machine's root is one of them, to whom ``/tmp`` belongs (user_namespaces(7)).
    """
    try:
        mapped = [int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if sum(mapped) >= _ALL_USERS - 1:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError, IndexError):
        return None
