"""Functions for the files of inner suites, whose tests in several processes note what they do and wait for files."""

from __future__ import annotations

import os
from pathlib import Path

from tests.deadline import eventually

_HANGING = "hanging"
"""The file with the ranks that wait forever, in the working directory."""


def note(file: str | Path, *words: object) -> None:
    """Append a line with `words` to `file`, in one write."""
    with open(file, "a", encoding="utf-8") as lines:
        print(*words, file=lines)


def wait_for(file: str | Path) -> None:
    """Wait until another process has made `file`; fail the test if it does not."""
    eventually(f"{file} to be made", Path(file).exists)


def hang_here() -> None:
    """Note that this rank waits forever from now on: with the plugin `late_driver`, the timeout of its test ends."""
    note(_HANGING, os.environ["RANK"], _test())


def ranks_that_hang() -> set[int]:
    """Return the ranks of the running test that have called `hang_here`."""
    lines = Path(_HANGING).read_text(encoding="utf-8").splitlines() if Path(_HANGING).exists() else []
    return {int(rank) for rank, _, test in (line.partition(" ") for line in lines) if test == _test()}


def _test() -> str:
    return os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]  # Without the phase.
