"""The private folders of sessions: creation, removal, the proof that a session is dead, trust, and paths of the files.

A session's folder has a lock file. The controller and the fork servers each keep a shared lock (flock(2)) on it; the
processes that they fork close it. The kernel drops a lock with its process, whatever ends the process, and also tells
processes of other containers that it is held. So a session is dead if nobody holds a lock, and no process id has to be
trusted.

If all of a session's processes are killed at the same moment, none of them removes the folder. The next session of the
user does (`remove_dead`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Literal

TEMPORARY = "/tmp"
"""The folder for temporary files of all users of a machine, in which their processes can find each other.

It is not `tempfile.gettempdir`, which follows TMPDIR: a batch system sets this for each job, a launcher perhaps for
some of its processes, and macOS for each user.
"""
_ALL_USERS = 1 << 32
_WRITABLE_BY_OTHERS = 0o022
_PREFIX = "accel-"
_LOCK = "session.lock"
_LONGEST_PARENT = 64
"""Characters; the path of a socket may have at most 104 on macOS and 108 on Linux (unix(7))."""
_claims: dict[str, int] = {}
"""The descriptor of the locked lock file of each folder that this process uses."""
HEADING = "\n===== test: "
"""Text before the name of each test, whose output follows, in a file of ``--accel-output``."""
ShownFile = Literal["output", "terminal"]
"""The files that a driver may show while they grow (`driver.output_tail`)."""
RankFile = Literal["sock", "stack", "flight", "output", "records", "terminal"]
"""The files of a rank in the session's folder.

- ``sock``: the socket on which the rank waits for its driver
- ``stack``: the place of its last collective, then the stacks that its fault handler writes
- ``flight``: the record of its collectives (flight recorder)
- ``output``: what its standard streams write
- ``records``: the log records that pytest has captured in the running phase
- ``terminal``: the live logs and the fixtures that pytest shows in it
"""
LAST_PLACE_SIZE = 1024
"""Bytes at the beginning of a file of stacks for the place of the rank's last collective."""


def create() -> str:
    """Create and claim a folder for a session, whose path is short enough for sockets, and return its path.

    The folder is in the temporary folder if no other user can replace folders there, else in ``/tmp``. If that is not
    sticky either, the machine protects no program's temporary files.
    """
    parent = tempfile.gettempdir()
    try:
        ensure_safe(parent)
        is_suitable = len(parent) <= _LONGEST_PARENT
    except OSError:
        is_suitable = False
    directory = tempfile.mkdtemp(prefix=_PREFIX, dir=parent if is_suitable else TEMPORARY)
    claim(directory)
    return directory


def ensure(directory: str) -> None:
    """Create the session's folder again if a fork server that crashed has removed it, and claim it."""
    ensure_own_folder(directory)
    claim(directory)


def claim(directory: str) -> None:
    """Lock the lock file of the session's folder, as long as this process lives or until :func:`remove`.

    If that is impossible, as on a file system without locks, nobody can prove that the session is dead.
    """
    path = os.path.join(directory, _LOCK)
    if directory in _claims and os.path.exists(path):
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not os.fstat(descriptor).st_size:
                os.write(descriptor, b"\n")  # After locking: a session is dead only if its file has been locked before.
        except OSError:
            os.close(descriptor)
            raise
        _unclaim(directory)
        _claims[directory] = descriptor


def remove(directory: str) -> None:
    """Remove the session's folder. A folder that cannot be removed is left to a later session's :func:`remove_dead`."""
    with suppress(Exception):  # A conftest may have replaced `os.unlink`, which rmtree uses, by a function that raises.
        rmtree(directory, ignore_errors=True)
    _unclaim(directory)


def _unclaim(directory: str) -> None:
    if (descriptor := _claims.pop(directory, None)) is not None:
        with suppress(OSError):  # A test may have closed it.
            os.close(descriptor)


def _unclaim_all() -> None:
    # A process that a test forks may outlive the session, which must not count as alive then.
    for directory in list(_claims):
        _unclaim(directory)


os.register_at_fork(after_in_child=_unclaim_all)


def remove_dead() -> None:
    """Remove the folders of dead sessions of this user. If none is dead, this lists the temporary folder only."""
    for parent in dict.fromkeys((tempfile.gettempdir(), TEMPORARY)):
        with suppress(OSError):
            ensure_safe(parent)  # Nobody else can replace a folder while it is being removed.
            for name in os.listdir(parent):
                if name.startswith(_PREFIX):
                    with suppress(OSError):
                        _remove_if_dead(os.path.join(parent, name))


def _remove_if_dead(path: str) -> None:
    """Remove the folder `path` if it belongs to a dead session. May raise OSError."""
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        return
    descriptor = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # Raises BlockingIOError if the session lives, or if another session is removing the folder.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_size:
            rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


# Trust: checks, by owner and mode, that other users cannot tamper with a folder


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


# Paths


def server_log_path(directory: str, server: int) -> str:
    """Return the path of a fork server's output."""
    return os.path.join(directory, f"server-{server}.log" if server else "server.log")


def agent_path(directory: str, server: int) -> str:
    """Return the path of the socket through which drivers reach the agent of a fork server on another machine."""
    return os.path.join(directory, f"agent-{server}.sock")


def rank_path(directory: str, world: int, rank: int, file: RankFile) -> str:
    """Return the path of the `file` of a rank."""
    return os.path.join(directory, f"w{world}r{rank}.{file}")


def store_folder(directory: str, world: int) -> str:
    """Return the path of the folder with the values that the ranks of a world share if torch is not installed."""
    return os.path.join(directory, f"w{world}.store")


def inner_lock_folder(directory: str, world: int, rank: int | None) -> str:
    """Return the path of the lock folder of the sessions inside a world's ranks, or inside one `rank` of it."""
    return os.path.join(directory, f"w{world}.locks" if rank is None else f"w{world}r{rank}.locks")


def current_folder() -> str | None:
    """Return the working directory of this process; None if it has been removed."""
    with suppress(OSError):
        return os.getcwd()
    return None
