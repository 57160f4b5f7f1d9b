"""The lock folder: one for all sessions and all users of the machine, and the files in it.

The lock folder is ``$PYTEST_ACCEL_LOCK_DIR``, else the temporary directory itself. No folder is made below the
temporary directory: whoever made it would own it, and the owner of a sticky folder may rename and delete the files of
others. A folder is used only if it belongs to root or to this user, and is sticky where others may write to it. So a
file in it can be replaced by root, by the owner of the folder and by the owner of the file. The parents of a folder
that ``$PYTEST_ACCEL_LOCK_DIR`` names are not checked: whoever may replace the folder can replace all locks.

The names of all files begin with ``pytest-accel-``. Lock files are readable and writable by all users whatever the
umask, because the session that creates one is not the only one that needs it. Symbolic links are never followed, and
whatever a file says is data, checked by whoever reads it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pwd
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pytest_accel.core.folder_trust import is_open_to_others, is_trusted_owner

VARIABLE = "PYTEST_ACCEL_LOCK_DIR"
PREFIX = "pytest-accel-"
"""The beginning of the name of every file: the temporary directory holds those of other programs too."""
_CONTENT_LIMIT = 64 * 1024
_FOR_ALL = 0o666


class LockFolderError(Exception):
    """The lock folder cannot be used; the message names the path and what is wrong with it."""


def default_folder() -> Path:
    """Return ``$PYTEST_ACCEL_LOCK_DIR``, else the temporary directory."""
    named = os.environ.get(VARIABLE)
    return Path(named).absolute() if named else Path(tempfile.gettempdir()).resolve()


def lock_path(folder: Path, device_id: str) -> Path:
    """Return the path of the lock file of a device."""
    return folder / f"{PREFIX}{file_name(device_id)}.lock"


def file_name(device_id: str) -> str:
    """`device_id` as a file name: itself where it is one, else made safe and told apart by a hash."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", device_id)[:100]
    return safe if safe == device_id else f"{safe}.{hashlib.sha256(device_id.encode()).hexdigest()[:12]}"


def prepare_folder(folder: Path) -> None:
    """Make `folder` where it is missing, for all users; :class:`LockFolderError` where it cannot be used."""
    try:
        # A mode given to mkdir is subject to the umask.
        with suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o1777)
        problem = folder_problem(folder)
    except OSError as error:
        raise unusable(folder, error) from error
    if problem is not None:
        raise LockFolderError(_sentence(f"{folder} {problem}"))


def folder_problem(folder: Path) -> str | None:
    """Return why `folder` must not be used, in words that follow its path; None if it may be. Raises OSError."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"is not a directory{' (a symbolic link is none)' if stat.S_ISLNK(found.st_mode) else ''}"
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
    if not os.access(folder, os.W_OK | os.X_OK):
        return "is not writable for this user"
    return None


def user_name(uid: int) -> str:
    """Return the login name of `uid`, or the number of one that has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def create_shared(path: Path) -> None:
    """An empty file that all users may open; nothing happens where there is one of this name. Raises OSError."""
    # Linked into place when its mode is right: another user must never meet a file that it may not open.
    draft = path.with_suffix(f".{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        os.fchmod(descriptor, 0o666)
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(descriptor)
        os.unlink(draft)


def open_file(path: Path, access: int = os.O_RDWR) -> int:
    """Return a descriptor of a regular file that is there; OSError for anything else of this name."""
    # No O_CREAT: where fs.protected_regular is set, the kernel refuses it on another user's file in a sticky folder.
    # O_NONBLOCK: a pipe that somebody put there must not hold this process up.
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if access & os.O_RDWR and mode & _FOR_ALL != _FOR_ALL:
        # Writing to a hard link that another user made would overwrite a file of this user's.
        os.close(descriptor)
        raise OSError(errno.EPERM, f"mode {stat.S_IMODE(mode):04o}: a lock file is writable by all (0666)", str(path))
    return descriptor


def write(descriptor: int, content: Mapping[str, object]) -> None:
    """Make `content` all that the file says. Raises OSError."""
    # In place, one write and then the cut: who reads in between finds the first line whole. A file put in place by a
    # rename would do as well, but ext4 writes it to the disk at once (auto_da_alloc), which takes half a millisecond.
    data = json.dumps(content).encode() + b"\n"
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def read(descriptor: int) -> bytes:
    """What :func:`write` has written, as JSON; any user may have written anything else."""
    return os.pread(descriptor, _CONTENT_LIMIT, 0).partition(b"\n")[0]


def unusable(path: Path, error: OSError) -> LockFolderError:
    """Return what to raise when `error` was met at `path`."""
    return LockFolderError(_sentence(f"{error.filename or path}: {error.strerror or error}"))


def printable(text: str, limit: int = 300) -> str:
    """Return `text`, which another user may have written, fit for a terminal: one line without control characters."""
    return "".join(character if character.isprintable() else "?" for character in text[:limit])


def _sentence(problem: str) -> str:
    return (
        f"the folder for device locks cannot be used: {problem}. Every session of the machine must be able to write "
        f"there; ${VARIABLE} names another folder."
    )
