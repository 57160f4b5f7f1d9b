"""Distinction of the user's code from that of libraries, by file path."""

from __future__ import annotations

import os
from sys import _current_frames
from threading import main_thread

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
LIBRARIES = ("/site-packages/", "/lib/python", PACKAGE)
"""Path parts of files that belong to Python, to installed packages or to this package."""


def is_library(path: str) -> bool:
    """Return whether the file `path` belongs to Python, to an installed package or to this package."""
    return any(part in path for part in LIBRARIES)


def place_of_main_thread() -> str:
    """Return the innermost frame of the main thread that is not in a library, as ``file:line in function``, or "".

    Called in another thread of this process.
    """
    frame = _current_frames().get(main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if not is_library(code.co_filename) and not code.co_filename.startswith("<"):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
