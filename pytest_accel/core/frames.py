"""Distinction of the user's code from that of libraries, by file path."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from sys import _current_frames
from threading import main_thread
from traceback import walk_stack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
"""The folder of this package."""
_LIBRARY = re.compile(r".*/(?:site-packages|lib/python[0-9.]+t?)/")
"""The folder in which Python or packages are installed; ``t`` is for a Python without the GIL."""
_SCOPE_MISMATCH = re.compile(r"ScopeMismatch: .*\n(?:(.+):(\d+):  def .*\n)+Requested fixture:\n")
"""pytest's text for a fixture that asks for one of a narrower scope: the last line before the end names the former."""


def is_library(path: str) -> bool:
    """Return whether the file `path` belongs to Python, to an installed package or to this package, or is no file."""
    return PACKAGE in path or _LIBRARY.match(path) is not None or path.startswith("<")


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of a session by which the paths in reports are interpreted and shown."""

    root: str = ""
    """pytest's rootdir; empty if it is unknown."""
    invocation: str = ""
    """pytest's invocation folder, to which relative paths in tracebacks refer."""

    def is_own(self, path: str) -> bool:
        """Return whether the file `path` is in rootdir and does not belong to a library."""
        return not is_library(path) and self.absolute(path).startswith(os.path.join(self.root, ""))

    def shown(self, path: str) -> str:
        """Return the `path` of a file in rootdir as pytest shows it, and of a library relative to its package."""
        if (library := _LIBRARY.match(path)) is not None:
            return path[library.end() :]
        if not self.root or not self.is_own(path):
            return path
        return os.path.relpath(self.absolute(path), self.invocation or self.root)

    def place_of_failure(self, places: Sequence[tuple[str, int]]) -> tuple[str, int]:
        """Return the file and line of a failure with the traceback `places`, whose last is the deepest.

        Prefer the deepest place in rootdir, then the deepest that is in no library.
        """
        users = [place for place in places if not is_library(place[0])]
        return ([place for place in users if self.is_own(place[0])] or users or places)[-1]

    def absolute(self, path: str) -> str:
        """Return the absolute form of a `path` in a traceback."""
        return os.path.normpath(os.path.join(self.invocation, path))


def folders_of(config: pytest.Config) -> Folders:
    """Return the folders of this session."""
    return Folders(str(config.rootpath), str(config.invocation_params.dir))


def failure_place(
    excinfo: pytest.ExceptionInfo[BaseException], longrepr: object, folders: Folders
) -> tuple[str, int] | None:
    """Return the file and line of the failure that `longrepr` shows; None if it shows no place.

    The frames are the exception's, since `longrepr` has all frames only in some styles of ``--tb``. A doctest fails at
    its example, and a ScopeMismatch at the fixture that asks for another, since all of its frames are pytest's.
    """
    for location, _ in getattr(longrepr, "reprlocation_lines", ()):
        return None if location.lineno is None else (str(location.path), location.lineno)
    if (crash := getattr(longrepr, "reprcrash", None)) is None:
        return None
    if match := _SCOPE_MISMATCH.search(crash.message):
        return os.path.join(folders.root, match[1]), int(match[2])
    shown = excinfo.traceback.filter(excinfo)
    return folders.place_of_failure([(str(entry.path), entry.lineno + 1) for entry in shown]) if shown else None


def place_of_main_thread() -> str:
    """Return the innermost frame of the main thread that is not in a library, as ``file:line in function``, or "".

    Called in another thread of this process.
    """
    for frame, line in walk_stack(_current_frames()[main_thread().ident or 0]):
        code = frame.f_code
        if not is_library(code.co_filename):
            return f"{code.co_filename}:{line} in {code.co_name}"
    return ""
