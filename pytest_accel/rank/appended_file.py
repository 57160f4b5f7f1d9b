"""A file of a rank in the session's private folder, to which it appends text."""

from __future__ import annotations

from contextlib import suppress
from os import truncate

_open = open  # A test may replace it.


class AppendedFile:
    """A file to which this process appends, and other processes may append, too.

    It is not kept open: a test may close every descriptor.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._filled = False

    def write(self, text: str) -> int:
        """Append `text` at once. Ignore errors such as a full disk: no test fails for want of this file."""
        self._filled = True
        with suppress(OSError), _open(self._path, "ab", buffering=0) as file:
            file.write(text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: the text is in the file."""

    def clear(self) -> None:
        """Empty the file if this process has written to it."""
        if self._filled:
            self._filled = False
            with suppress(OSError):
                truncate(self._path, 0)
