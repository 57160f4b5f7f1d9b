"""Files that are written whole or not at all, so that a reader never finds the half of one."""

from __future__ import annotations

import contextlib
import os
import uuid


def write(path: str, text: str) -> None:
    """Replace the file `path` by one with `text`, in UTF-8; create its folder.

    Lone surrogates, which UTF-8 lacks, are written as escapes.

    Raise OSError if that fails. The old file is kept then.
    """
    if not os.path.exists(_folder(path)):
        os.makedirs(_folder(path), exist_ok=True)
    temporary = _temporary(path)
    try:
        with open(temporary, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def remove(path: str) -> None:
    """Remove the file that an earlier session has written, if possible, so that it is not taken for this session's."""
    if os.path.isfile(path):  # Not a device such as /dev/null.
        with contextlib.suppress(OSError):
            os.unlink(path)


def check_folder(path: str) -> None:
    """Create the folder of `path` if it does not exist. Raise OSError unless files can be created in it."""
    os.makedirs(_folder(path), exist_ok=True)
    temporary = _temporary(path)
    with open(temporary, "x", encoding="ascii"):
        pass
    os.unlink(temporary)


def _folder(path: str) -> str:
    return os.path.dirname(path) or "."


def _temporary(path: str) -> str:
    """Return the path of a new file in the folder of `path`."""
    return os.path.join(_folder(path), f".accel-{uuid.uuid4().hex}")
