"""The lock folder: one for all sessions and all users of the machine, and the files in it.

It is ``$PYTEST_ACCEL_LOCK_DIR``, else ``pytest-accel-locks`` in the temporary directory. Folders are sticky and
world-writable, lock files are readable and writable by all whatever the umask, because the session that creates them is
not the only one that needs them. No name in them is ever followed as a symbolic link.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

VARIABLE = "PYTEST_ACCEL_LOCK_DIR"
_CONTENT_LIMIT = 64 * 1024


class LockFolderError(Exception):
    """The lock folder cannot be used; the message names the path and what is wrong with it."""


def default_folder() -> Path:
    """``$PYTEST_ACCEL_LOCK_DIR``, else ``pytest-accel-locks`` in the temporary directory."""
    named = os.environ.get(VARIABLE)
    return Path(named).absolute() if named else Path(tempfile.gettempdir(), "pytest-accel-locks")


def file_name(device_id: str) -> str:
    """`device_id` as a file name: itself where it is one, else made safe and told apart by a hash."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", device_id)[:100]
    return safe if safe == device_id else f"{safe}.{hashlib.sha256(device_id.encode()).hexdigest()[:12]}"


def prepare_folder(folder: Path) -> None:
    """Make `folder` one for all users, whose names nobody else can take; :class:`LockFolderError` where that fails."""
    try:
        # A mode given to mkdir is subject to the umask.
        with suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o1777)
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory (a symbolic link is none)", str(folder))
        for _ in range(20):
            if os.access(folder, os.W_OK | os.X_OK):
                return
            # Another user may have come between mkdir and chmod.
            time.sleep(0.005)
        raise PermissionError(errno.EACCES, "not writable for this user", str(folder))
    except OSError as error:
        raise unusable(folder, error) from error


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
    """A descriptor of a regular file that is there; OSError for anything else of this name."""
    # No O_CREAT: where fs.protected_regular is set, the kernel refuses it on another user's file in a sticky folder.
    # O_NONBLOCK: a pipe that somebody put there must not hold this process up.
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
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
    """What to raise when `error` was met at `path`."""
    return LockFolderError(
        f"the folder for device locks cannot be used: {error.filename or path}: {error.strerror or error}. Every "
        f"session of the machine must be able to write there; ${VARIABLE} names another folder."
    )
