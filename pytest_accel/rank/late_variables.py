"""Environment variables that torch reads when it is imported, and that a test file sets later.

Such a variable has an effect under plain pytest, and none in a rank that was forked from a process with torch.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from os import environ
from os.path import relpath
from pathlib import Path

from pytest_accel import PreloadWarning
from pytest_accel.compat.torch_variables import READ_AT_IMPORT
from pytest_accel.messages.rank_messages import WarningSketch


class LateVariables:
    """Finds the variables that test files set too late. There is one instance in each rank."""

    def __init__(self) -> None:
        """Call this when the rank has its environment, before any file of the suite is imported."""
        self.active = "torch" in sys.modules
        """False if the rank began without torch, because its test or the session asks for that."""
        self._original = _values()
        self._changed: list[tuple[str, str]] = []
        """Paths of test files, each with a variable that the file has changed after torch has read it."""

    @contextmanager
    def watching(self, path: str) -> Generator[None, None, None]:
        """Find the variables that change in this block, in which the test file `path` is imported."""
        before = _values()
        try:
            yield
        finally:
            if self.active:
                after = _values()
                self._changed += [
                    (path, name)
                    for name in sorted(READ_AT_IMPORT)
                    if after[name] not in (before[name], self._original[name])
                ]

    def take_warnings(self, root: Path) -> list[WarningSketch]:
        """Return a warning for each variable that has been set too late since the last call.

        Paths are shown relative to `root`. A test gets the warnings of another file if the rank has run no test of it.
        """
        changed, self._changed = self._changed, []
        return [
            WarningSketch(
                f"{relpath(path, root)} sets {name}, which torch reads when it is imported: no effect in ranks, which "
                "are forked from a process that has imported torch. Set it in the mark's env=, or where pytest is "
                "started, or use accel_preload = none",
                PreloadWarning.__module__,
                PreloadWarning.__name__,
                path,
                1,
                None,
            )
            for path, name in changed
        ]


def _values() -> dict[str, str | None]:
    return {name: environ.get(name) for name in READ_AT_IMPORT}
