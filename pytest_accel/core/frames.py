"""Which code is a library's, and which is the user's."""

from __future__ import annotations

import os
from sys import _current_frames
from threading import main_thread

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
LIBRARIES = ("/site-packages/", "/lib/python", PACKAGE)
"""Parts of the paths of files that are Python's own, an installed package's or this package's."""


def is_library(path: str) -> bool:
    """Whether a file is Python's own, an installed package's or this package's."""
    return any(part in path for part in LIBRARIES)


def place_of_main_thread() -> str:
    """Return what :func:`where` would say of this process's own main thread; called in another thread."""
    frame = _current_frames().get(main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if not is_library(code.co_filename) and not code.co_filename.startswith("<"):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
