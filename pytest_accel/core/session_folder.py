"""The private folders of sessions: their creation, their removal, and the proof that a session is dead.

A session's folder has a lock file. The controller and the fork servers each keep a shared lock (flock(2)) on it; the
processes that they fork close it. The kernel drops a lock with its process, whatever ends the process, and also tells
processes of other containers that it is held. So a session is dead if nobody holds a lock, and no process id has to be
trusted.

If all of a session's processes are killed at the same moment, none of them removes the folder. The next session of the
user does (`remove_dead`).
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from shutil import rmtree

from pytest_accel.core.folder_trust import TEMPORARY, ensure_own_folder, ensure_safe

_PREFIX = "accel-"
_LOCK = "session.lock"
_LONGEST_DIRECTORY = 80
"""Characters; the path of a socket may have at most 104 on macOS and 108 on Linux (unix(7))."""
_claims: dict[str, int] = {}
"""The descriptor of the locked lock file of each folder that this process uses."""


def create() -> str:
    """Create and claim a folder for a session, whose path is short enough for sockets, and return its path.

    If other users can write to every temporary folder, they can replace the new folder. The sockets are protected even
    then (`unix_sockets`).
    """
    directory = _create()
    claim(directory)
    return directory


def _create() -> str:
    try:
        ensure_safe(tempfile.gettempdir())
    except OSError:
        return tempfile.mkdtemp(prefix=_PREFIX, dir=TEMPORARY)
    directory = tempfile.mkdtemp(prefix=_PREFIX)
    if len(directory) <= _LONGEST_DIRECTORY:
        return directory
    rmtree(directory)
    return tempfile.mkdtemp(prefix=_PREFIX, dir=TEMPORARY)


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
