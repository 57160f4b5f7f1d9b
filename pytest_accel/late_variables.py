"""Warnings about variables that torch reads when it is imported, and that a test file sets.

Such a variable has an effect under plain pytest, and none in a rank that was forked from a process with torch. Only
statements at the beginning of a line are found. Imported when a file with marked tests is collected.
"""

from __future__ import annotations

import re
import warnings
from os import environ
from os.path import relpath
from pathlib import Path

from pytest_accel import PreloadWarning
from pytest_accel.compat.torch_variables import READ_AT_IMPORT

_SET = re.compile(
    r"""^(?:os\.)?environ(?:\[|\.(setdefault)\()["'](\w+)["'](?:\]\s*=|,)\s*(?:["']([^"']*)["'])?""", re.MULTILINE
)
"""Matches the statement that sets a variable. The third group is its value, if that is a plain text."""


def warn_about(path: Path, text: str, root: Path) -> None:
    """Warn about each variable that the test file `path` with this `text` sets too late; never raise the warning.

    The path is shown relative to `root`. There is no warning if the variable has the value already.
    """
    for match in _SET.finditer(text):
        default, name, value = match.groups()
        if name not in READ_AT_IMPORT or (name in environ and (default or environ[name] == value)):
            continue
        message = (
            f"{relpath(path, root)} sets {name}, which torch reads when it is imported: no effect in ranks, which are "
            "forked from a process that has imported torch. Set it in the mark's env=, or where pytest is started, or "
            "use accel_preload = none"
        )
        place = str(path), text.count("\n", 0, match.start()) + 1
        try:
            warnings.warn_explicit(message, PreloadWarning, *place)
        except PreloadWarning:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn_explicit(message, PreloadWarning, *place)
