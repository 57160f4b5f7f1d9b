"""The place of the last collective that this rank has issued, for the report of a rank that is killed."""

from __future__ import annotations

from contextlib import suppress
from mmap import mmap
from types import CodeType
from typing import IO

from pytest_accel.core.session_folder import LAST_PLACE_SIZE


class LastPlace:
    """The first bytes of the rank's file of stacks, mapped into memory: they outlive a process that SIGKILL ends.

    A rank that runs out of memory is killed without a stack. With this, its report says how far it had come.
    """

    def __init__(self, file: IO[str]) -> None:
        """`file` is empty; what is written to it later follows the place."""
        file.truncate(LAST_PLACE_SIZE)
        file.seek(LAST_PLACE_SIZE)
        self._bytes = mmap(file.fileno(), LAST_PLACE_SIZE)

    def set(self, code: CodeType, line: int) -> None:
        """Set the place to the `line` of `code`, in the format of `python_stacks`."""
        text = f'Thread 0x0:\n  File "{code.co_filename}", line {line} in {code.co_name}\n\0'.encode()
        with suppress(IndexError):  # The path is too long.
            self._bytes[: len(text)] = text

    def clear(self) -> None:
        """Forget the place, at the start of a test."""
        self._bytes[0] = 0
