"""The end of a rank's log."""

from __future__ import annotations

from os import fstat
from pathlib import Path

from pytest_accel.core.paths import HEADING

LAST_OUTPUT = 8_000
"""Maximum number of bytes or characters of a log that are shown."""


def tail(path: str, limit: int = LAST_OUTPUT) -> str:
    """Return the end of a log, at most `limit` bytes of it; empty if there is no log.

    Of a log that is kept over several tests, only the part of the last test is returned.
    """
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, fstat(file.fileno()).st_size - limit))
            text = file.read(limit).decode(errors="replace")
    except OSError:
        return ""
    _, heading, last = text.rpartition(HEADING)
    return (last.partition("\n")[2] if heading else text).strip("\n")
