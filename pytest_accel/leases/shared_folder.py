"""The folder that all sessions and users of the machine share, and access to the files in it.

The folder is ``$PYTEST_ACCEL_LOCK_DIR``, else ``/tmp`` itself: sessions exclude each other only if all of them use one
folder, whatever their users and variables. So there is no other folder to fall back on if it cannot be used; that is an
error. No folder is created below ``/tmp``: its creator would own it, and the owner of a sticky folder may rename and
delete the files of other users. ``/run/lock`` was rejected because not every system has it and lets all users write to
it. A folder is used only if it belongs to root or to this user, and if it is sticky where others may write to it. So
only root, the owner of the folder and the owner of a file can replace that file. The parents of the folder that
``$PYTEST_ACCEL_LOCK_DIR`` names are not checked: a user who may replace the folder can replace all locks.

The names of all files begin with ``pytest-accel-``. Lock files are readable and writable by all users, whatever the
umask, because the sessions of other users need them too. Symbolic links are never followed, and the content of a file
is untrusted data that each reader checks.

Files and the kernel's locks on them were chosen over a daemon, which somebody would have to start, keep alive and trust
across users: the kernel drops the lock of a process that dies, and every session works without the others.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pwd
import re
import stat
from contextlib import suppress
from os import access, close, fchmod, fstat, lstat
from os import open as open_descriptor
from pathlib import Path

from pytest_accel.core.session_folder import TEMPORARY, is_open_to_others, is_trusted_owner

VARIABLE = "PYTEST_ACCEL_LOCK_DIR"
PREFIX = "pytest-accel-"
"""Prefix of every file name: ``/tmp`` also holds files of other programs."""
TEXT_LIMIT = 300
"""Maximum number of characters of a text in a file."""
_FOR_ALL = 0o666
_NOT_OPENED = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EOPNOTSUPP, errno.EACCES)
"""The errors of open(2) for entries that no session made: a link, a directory, a socket, or a file of another mode."""


class PlaceError(Exception):
    """A world has no place to run, since its needs cannot be met; the message says why."""


class LockFolderError(PlaceError):
    """The lock folder cannot be used; the message names the path and what is wrong with it."""


class NoLockFileError(OSError):
    """A file or directory has the name of a lock file, but is none."""

    def __init__(self, path: Path, mode: int) -> None:
        what = f"its mode is {stat.filemode(mode)}, and not {stat.filemode(stat.S_IFREG | _FOR_ALL)}"
        super().__init__(errno.EINVAL, what, str(path))
        self.about = f"{path}, which is no lock file ({what})"
        """The path, and why the entry there is no lock file."""


def default_folder() -> Path:
    """Return ``$PYTEST_ACCEL_LOCK_DIR``, else ``/tmp`` (on macOS that is a link)."""
    named = os.environ.get(VARIABLE)
    return Path(named).absolute() if named else Path(TEMPORARY).resolve()


def lock_path(folder: Path, device_id: str, what: str = "lock") -> Path:
    """Return the path of a lock file of a device; :mod:`pytest_accel.leases.locks` has the three kinds."""
    return folder / f"{PREFIX}{file_name(device_id)}.{what}"


def file_name(device_id: str) -> str:
    """Return `device_id` if it is a safe file name, else a safe name that a hash makes unique."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", device_id)[:100]
    return safe if safe == device_id else f"{safe}.{hashlib.sha256(device_id.encode()).hexdigest()[:12]}"


def prepare_folder(folder: Path) -> None:
    """Create `folder` for all users if it is missing. Raises :class:`LockFolderError` if it cannot be used."""
    try:
        # chmod, because the umask applies to a mode given to mkdir.
        with suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o1777)
        problem = folder_problem(folder)
    except OSError as error:
        raise unusable(folder, error) from error
    if problem is not None:
        raise LockFolderError(_sentence(f"{folder} {problem}"))


def folder_problem(folder: Path) -> str | None:
    """Return the reason why `folder` must not be used, as text to follow its path, or None. Raises OSError."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"is not a directory{' (symbolic links are not allowed)' if stat.S_ISLNK(found.st_mode) else ''}"
    if not is_trusted_owner(found.st_uid):
        return (
            f"belongs to {user_name(found.st_uid)}, who could replace the locks of other users; allowed is a folder of "
            "root's or of this user's own (as root, `install -d -m 1777 FOLDER` makes one for all users)"
        )
    if is_open_to_others(found.st_mode):
        return (
            f"has mode {stat.S_IMODE(found.st_mode):04o}: other users may write to it and could replace locks, since "
            "it is not sticky (`chmod +t FOLDER` makes it so)"
        )
    if not access(folder, os.W_OK | os.X_OK):
        return "is not writable for this user"
    return None


def unusable(path: Path, error: OSError) -> LockFolderError:
    """Return the :class:`LockFolderError` to raise for an `error` that occurred at `path`."""
    return LockFolderError(_sentence(f"{error.filename or path}: {error.strerror or error}"))


def _sentence(problem: str) -> str:
    return (
        f"the folder for device locks cannot be used: {problem}. Every session of the machine must be able to write "
        f"there; ${VARIABLE} names another folder."
    )


# Files in the folder


def create_shared(path: Path) -> None:
    """Create an empty file that all users may open; an existing file is left as it is. Raises OSError."""
    with suppress(FileExistsError):
        descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _FOR_ALL)
        # The umask applies to the mode given to open(2). For other users who find the file before this call, its device
        # counts as held, and they try again.
        fchmod(descriptor, _FOR_ALL)
        close(descriptor)


def open_lock_file(path: Path, flags: int = os.O_RDWR) -> int:
    """Open an existing lock file, which all users may write to, and return its descriptor.

    Raises :class:`NoLockFileError` for anything else, and OSError if no file can be opened.
    """
    # No O_CREAT: if fs.protected_regular is set, the kernel refuses it on another user's file in a sticky folder.
    # O_NONBLOCK: opening a named pipe that another user placed there must not block.
    try:
        descriptor = open_descriptor(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_OPENED:
            raise NoLockFileError(path, lstat(path).st_mode) from None
        raise
    mode = fstat(descriptor).st_mode
    # The path may be a hard link, made by another user, to a file of this user, which writing would destroy.
    if stat.S_ISREG(mode) and mode & _FOR_ALL == _FOR_ALL:
        return descriptor
    close(descriptor)
    raise NoLockFileError(path, mode)


def printable(text: str) -> str:
    """Return untrusted `text` as one line without control characters, truncated to `TEXT_LIMIT` characters."""
    return "".join(character if character.isprintable() else "?" for character in text[:TEXT_LIMIT])


def user_name(uid: int) -> str:
    """Return the login name of `uid`, or `uid` as text if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
