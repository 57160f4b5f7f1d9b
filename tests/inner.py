"""Functions for the files of inner suites, whose tests in several processes note what they do and wait for files."""

from __future__ import annotations

from pathlib import Path

from tests.deadline import eventually


def note(file: str | Path, *words: object) -> None:
    """Append a line with `words` to `file`, in one write."""
    with open(file, "a", encoding="utf-8") as lines:
        print(*words, file=lines)


def wait_for(file: str | Path) -> None:
    """Wait until another process has made `file`; fail the test if it does not."""
    eventually(f"{file} to be made", Path(file).exists)
