"""Files that are written whole or not at all, so that a reader never finds half a file."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import uuid


def write(path: str, text: str) -> None:
    """Replace the file `path` by a file with `text`, in UTF-8; create its folder. Symbolic links are followed.

    Lone surrogates, which UTF-8 lacks, are written as escapes.

    Raise OSError if that fails. The old file is kept then.
    """
    path = _followed(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = os.path.join(os.path.dirname(path), f".accel-{uuid.uuid4().hex}")
    try:
        with open(temporary, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def remove(path: str, beginnings: bytes) -> None:
    """Remove the file that an earlier session has written, if possible, so that it is not taken for this session's.

    Raise FileExistsError for another file, such as the test file after an option whose value was forgotten: the
    file is not empty, and its first byte is none of `beginnings`.
    """
    if not os.path.isfile(path):  # For example a device such as /dev/null.
        return
    first = b""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        first = file.read(1)
    if first not in beginnings:
        raise FileExistsError(errno.EEXIST, "it exists and has other content, which would be lost", path)
    with contextlib.suppress(OSError):
        os.unlink(os.path.realpath(path))


def check_folder(path: str) -> None:
    """Create the folder of `path` if it does not exist. Raise OSError unless :func:`write` can write the file."""
    path = _followed(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    tempfile.TemporaryFile(dir=os.path.dirname(path)).close()


def _followed(path: str) -> str:
    """Return `path` without symbolic links. Raise OSError for a device, a pipe or a folder, which are not replaced."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return os.path.realpath(path)
