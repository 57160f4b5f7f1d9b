"""Access to files that any user of the machine may write to.

The files are readable and writable by all users, whatever the umask, because the sessions of other users need them too.
Symbolic links are never followed, and the content of a file is untrusted data that each reader checks.
"""

from __future__ import annotations

import errno
import os
import pwd
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from json import dumps
from os import close, fchmod, fstat, ftruncate, link, pread, pwrite, unlink
from os import open as open_descriptor
from pathlib import Path

_CONTENT_LIMIT = 256 * 1024
"""Maximum number of bytes of a file's content. A lock file of this size has room for 8,000 processes at least."""
TEXT_LIMIT = 300
"""Maximum number of characters of a text in a file."""
_FOR_ALL = 0o666


def create_shared(path: Path) -> None:
    """Create an empty file that all users may open; an existing file is left as it is. Raises OSError."""
    # Create it under another name and link it once its mode is set: another user must never find a file that it
    # may not open.
    temporary = path.with_suffix(f".{secrets.token_hex(4)}")
    descriptor = open_descriptor(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _FOR_ALL)
    try:
        fchmod(descriptor, _FOR_ALL)
        with suppress(FileExistsError):
            link(temporary, path)
    finally:
        close(descriptor)
        unlink(temporary)


def open_file(path: Path, access: int = os.O_RDWR) -> int:
    """Open an existing regular file and return its descriptor. Raises OSError for anything else.

    A file opened for writing must be writable by all users.
    """
    # No O_CREAT: if fs.protected_regular is set, the kernel refuses it on another user's file in a sticky folder.
    # O_NONBLOCK: opening a named pipe that another user placed there must not block.
    descriptor = open_descriptor(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if access & os.O_RDWR and mode & _FOR_ALL != _FOR_ALL:
        # The path may be a hard link, made by another user, to a file of this user, which writing would destroy.
        close(descriptor)
        raise OSError(errno.EPERM, f"mode {stat.S_IMODE(mode):04o}: a lock file is writable by all (0666)", str(path))
    return descriptor


def write(descriptor: int, content: Mapping[str, object]) -> None:
    """Replace the file's content by `content` as one line of JSON.

    Raises OSError if it cannot be written completely, or is longer than :func:`read` reads.
    """
    data = dumps(content).encode() + b"\n"
    if len(data) > _CONTENT_LIMIT:
        raise OSError(errno.EFBIG, f"{len(data)} bytes are to be written; allowed are {_CONTENT_LIMIT}")
    # One write in place, then truncate: a reader in between finds the first line complete. Renaming a new file into
    # place would be safe too, but ext4 then writes it to the disk at once (auto_da_alloc), which takes 0.5 ms.
    written = pwrite(descriptor, data, 0)
    if written < len(data):
        raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes could be written")
    ftruncate(descriptor, len(data))


def read(descriptor: int) -> bytes:
    """Return the JSON that :func:`write` has written. Any user may have written something else."""
    return pread(descriptor, _CONTENT_LIMIT, 0).partition(b"\n")[0]


def printable(text: str) -> str:
    """Return untrusted `text` as one line without control characters, truncated to `TEXT_LIMIT` characters."""
    return "".join(character if character.isprintable() else "?" for character in text[:TEXT_LIMIT])


def user_name(uid: int) -> str:
    """Return the login name of `uid`, or `uid` as text if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
