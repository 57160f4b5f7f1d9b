"""Comparison of the code with which two machines would run tests: the suite's files and the versions of packages."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

_PACKAGES = ("pytest-accel", "pytest", "torch")
_NO_CODE = {"__pycache__", "node_modules", "site-packages"}
"""Names of folders without code of the suite."""
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
"""Names in the folder of a virtual environment, and of one of conda."""
_NAMED = 3
"""Maximum number of files that a message names."""


@dataclass(frozen=True, slots=True)
class SuiteCode:
    """The code of a suite on one machine."""

    files: Mapping[str, str]
    """Digest of each Python file below the root directory, by its path relative to that."""
    versions: Mapping[str, str]
    """Version of Python and of the packages on which ranks depend."""


def suite_code(rootdir: str) -> SuiteCode:
    """Return the code below `rootdir` on this machine. Hidden folders and virtual environments do not count."""
    files = {}
    for path in _python_files(rootdir):
        try:
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()[:16]
        except OSError:  # The file has been deleted, or is unreadable: importing it will say so.
            continue
        files[os.path.relpath(path, rootdir)] = digest
    return SuiteCode(files, {"Python": platform.python_version(), **dict(_versions())})


def difference(here: SuiteCode, there: SuiteCode) -> str | None:
    """Return how the code `there`, on another machine, differs from that of this machine; None if it does not."""
    versions = [
        f"{name} {there.versions.get(name, 'is missing')} (here {version})"
        for name, version in here.versions.items()
        if there.versions.get(name) != version
    ]
    if versions:
        return f"other versions: {', '.join(versions)}"
    if here.files and not there.files:
        return "it has no Python files there; the suite must have the same path on all machines"
    names = sorted(
        name for name in here.files.keys() | there.files.keys() if here.files.get(name) != there.files.get(name)
    )
    if not names:
        return None
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"other files: {', '.join(names[:_NAMED])}{more}"


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


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
