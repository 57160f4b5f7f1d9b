"""Comparison of the code with which two machines would run tests: the suite's files and the versions of packages."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata

_PACKAGES = ("pytest-accel", "pytest", "torch")
_NO_CODE = {"__pycache__", "node_modules", "site-packages"}
"""Names of folders without code of the suite."""
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
"""Names in the folder of a virtual environment, and in the folder of a conda environment."""
_NAMED = 3
"""Maximum number of packages and files that a message names."""


def suite_code(rootdir: str) -> dict[str, str]:
    """Return the code on this machine: versions by package, and digests of the Python files by path below `rootdir`.

    Hidden folders and virtual environments do not count.
    """
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    for path in _python_files(rootdir):
        with suppress(OSError), open(path, "rb") as file:  # The file may have been deleted, or be unreadable.
            found[os.path.relpath(path, rootdir)] = hashlib.sha256(file.read()).hexdigest()[:16]
    return found


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """Return how the code `there`, on another machine, differs from the code on this machine; None if it does not."""
    names = [name for name in here.keys() | there.keys() if here.get(name) != there.get(name)]
    if not names:
        return None
    if any(map(_is_file, here)) and not any(map(_is_file, there)):
        return "it has no Python files there; the suite must have the same path on all machines"
    texts = [
        name if _is_file(name) else f"{name} {there.get(name, 'is missing')} (here {here.get(name, 'missing')})"
        for name in sorted(names, key=lambda name: (_is_file(name), name))
    ]
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return f"it has other code: {', '.join(texts[:_NAMED])}{more}"


def _is_file(name: str) -> bool:
    return name.endswith(".py")


def _python_files(rootdir: str) -> Iterator[str]:
    for folder, folders, names in os.walk(rootdir):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _NO_CODE
            and not any(os.path.exists(os.path.join(folder, name, mark)) for mark in _ENVIRONMENT_MARKS)
        ]
        # A named pipe, for example, would block the process that opens it.
        yield from filter(os.path.isfile, (os.path.join(folder, name) for name in names if name.endswith(".py")))
