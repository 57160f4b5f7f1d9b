"""Reference files that a plugin generates from what tests return: the driver writes them, if all ranks agree.

Each rank generates into a folder of its own, so that no two processes write the same file, and ranks can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.features.plugins.by_rank import fail, number_of_ranks
from pytest_accel.features.plugins.rank_files import put
from pytest_accel.rank.context import RANK

_EXACT = (".png", ".txt")
"""Suffixes of files that have the same bytes if their content is the same; others may contain their creation time."""


class GeneratedFiles:
    """Sends the files that rank 0 has generated for a test, and from other ranks their hashes. Used in ranks."""

    def __init__(self, config: pytest.Config, name: str) -> None:
        """`name` is the name of the folder in which the rank generates files."""
        context = config.stash[RANK]
        self._rank = context.rank
        # Below the session's private folder, which is deleted even if this rank is killed.
        self.folder = Path(context.session.directory, f"w{context.spec.world}r{context.rank}.{name}")
        """The folder in which this rank generates files."""
        self.folder.mkdir()

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, bytes | str] | None:
        """Return the files, or hashes of files, by name; None if no file was generated."""
        if report.when != "call":
            return None
        found: dict[str, bytes | str] = {}
        for path in [path for path in self.folder.rglob("*") if path.is_file()]:
            data = path.read_bytes()
            found[path.relative_to(self.folder).as_posix()] = data if self._rank == 0 else _digest(path.name, data)
            path.unlink()
        return found or None


class ReferenceFiles:
    """Writes the files of rank 0 if all ranks have generated the same files. Used in the driver."""

    def __init__(self, folder: str | Path) -> None:
        """`folder` is the folder of the reference files."""
        self._folder = Path(folder).absolute()

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        files = sent.get(0, {})
        hashes = {**sent, 0: {name: _digest(name, data) for name, data in files.items()}} if files else sent
        if all_agree(item, report, hashes):
            for name, data in files.items():
                put(self._folder / name, data)


def all_agree(item: pytest.Item, report: pytest.TestReport, made: Mapping[int, Mapping[str, str]]) -> bool:
    """Return True if the test has not failed and all its ranks have generated the same. Fail `report` if ranks differ.

    `made` has the hashes of the generated files by rank and name.
    """
    if report.failed:
        return False
    first = min(made)
    different = [rank for rank in made if made[rank] != made[first]]
    complete = len(made) == number_of_ranks(item)
    if complete and not different:
        return True
    names = ", ".join(sorted({name for hashes in made.values() for name in hashes}))
    if different:
        text = f"{ranks_text(different)} generated {names} with other content than rank {first}"
    else:
        text = f"only {ranks_text(list(made))} generated {names}"
    fail(report, "reference files", f"{text}: nothing has been written")
    return False


def _digest(name: str, data: bytes) -> str:
    return sha256(data).hexdigest() if name.endswith(_EXACT) else ""
