"""The lock folder, which all sessions and users of the machine share, and the names of the files in it.

The lock folder is ``$PYTEST_ACCEL_LOCK_DIR``, else the temporary directory itself. No folder is created below the
temporary directory: its creator would own it, and the owner of a sticky folder may rename and delete the files of
other users. A folder is used only if it belongs to root or to this user, and if it is sticky where others may write to
it. So only root, the owner of the folder and the owner of a file can replace that file. The parents of the folder that
``$PYTEST_ACCEL_LOCK_DIR`` names are not checked: a user who may replace the folder can replace all locks.

The names of all files begin with ``pytest-accel-``. `shared_files` has the access to them.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from pytest_accel.core.folder_trust import is_open_to_others, is_trusted_owner
from pytest_accel.leases.shared_files import user_name

VARIABLE = "PYTEST_ACCEL_LOCK_DIR"
PREFIX = "pytest-accel-"
"""Prefix of every file name: the temporary directory also holds files of other programs."""


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
    if not os.access(folder, os.W_OK | os.X_OK):
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
